// Plays runs from zero, each at the pace at which it came, beside each other. A run may still be coming meanwhile: then
// it is played as it comes. No view in here.

const TICK = 33; // milliseconds: a timer, because a hidden tab has no frames and must come to an end too

/** How many of a run's steps had come `elapsed` milliseconds after its first. The first pass reads the prompt: clocks
 * begin where it has. */
export function due(steps, elapsed) {
  const late = steps.findIndex((step) => step.at - steps[0].at > elapsed);
  return late === -1 ? steps.length : late;
}

/** Milliseconds from the first step of a run to the last of `count`. */
export const duration = (steps, count = steps.length) => (count ? steps[count - 1].at - steps[0].at : 0);

/**
 * Draws every track ({run, draw(count, milliseconds)}) until all of its run is drawn, `slow` times slower than it was.
 * An aborted signal draws the rest at once.
 */
export function play(tracks, signal, slow = 1) {
  const began = performance.now();
  const drawn = tracks.map(() => 0);
  const tick = (all = false) =>
    tracks.forEach(({ run, draw }, i) => {
      const elapsed = (performance.now() - began) / slow;
      const count = all ? run.steps.length : due(run.steps, elapsed);
      draw(count, run.ended && count === run.steps.length ? duration(run.steps) : elapsed);
      drawn[i] = count;
    });
  const over = () => tracks.every(({ run }, i) => run.ended && drawn[i] === run.steps.length);
  return new Promise((resolve) => {
    const end = () => {
      clearInterval(timer);
      tick(true);
      resolve();
    };
    const timer = setInterval(() => {
      tick();
      if (signal.aborted || over()) end();
    }, TICK);
    signal.addEventListener("abort", end, { once: true });
    tick();
  });
}

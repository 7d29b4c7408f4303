"""Worker for vLLM: its engine in this process, plain, or with drafts that it looks up in the text or
takes from a draft model. It has one draft length for its whole life, so each depth is an engine of
its own, loaded when it is first asked for; only one is kept. A checkpoint that runs in int8 is
converted first.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import worker

LONGEST_LOOKUP = 4  # tokens that vLLM looks for in the text


class Vllm:
    """An engine for one way to decode."""

    plain = worker.MANY
    depths = samples = True

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        if options["device"] == "cpu":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # `step` is called here
        import vllm

        self.version = vllm.__version__
        self.speculative = worker.MANY if options["draft"] or options["lookup"] else 0
        self.depth, self.number = 0, 0
        self.target = self._converted(options["model"], options["format"])
        self.engine = self._load(0)

    def _converted(self, directory: str, form: str) -> str:
        """Return the directory of a checkpoint in a format; for int8 it is converted first."""
        if form != "int8":
            return directory
        from write_int8 import convert

        converted = worker.converted(self.options["converted"], directory, "int8.vllm")
        convert(Path(directory), converted)
        return str(converted)

    def _load(self, depth: int) -> Any:
        from vllm import EngineArgs, LLMEngine

        options, drafting = self.options, None
        if depth and options["draft"]:
            draft = self._converted(options["draft"], options["draft_format"])
            drafting = {"method": "draft_model", "model": draft}
        elif depth:
            drafting = {"method": "ngram", "prompt_lookup_max": LONGEST_LOOKUP}
        if drafting:
            drafting["num_speculative_tokens"] = depth
        arguments = EngineArgs(
            model=self.target,
            dtype="bfloat16" if options["format"] == "int8" else options["format"],
            max_model_len=options["context"],
            max_num_seqs=options["requests"],
            max_num_batched_tokens=options["requests"] * options["context"],
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            speculative_config=drafting,
        )
        return LLMEngine.from_engine_args(arguments)

    def run(
        self, depth: int, prompts: worker.Prompts, tokens: int, temperature: float
    ) -> dict[str, Any]:
        """As `worker.Engine.run`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if depth != self.depth:
            self.engine = None
            gc.collect()
            self.engine, self.depth = self._load(depth), depth
        params = SamplingParams(
            temperature=temperature,
            seed=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        outputs: list[list[int]] = [[] for _ in prompts]
        self.number += 1
        watch = worker.Watch(len(prompts))
        for i, prompt in enumerate(prompts):
            name = f"{self.number}-{i}"
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while self.engine.has_unfinished_requests():
            counts = {}
            for output in self.engine.step():
                i = int(output.request_id.split("-")[1])
                new = list(output.outputs[0].token_ids)
                outputs[i] += new
                counts[i] = len(new)
            watch.step({i: count for i, count in counts.items() if count})
        answer: dict[str, Any] = watch.answer(outputs)
        return answer


if __name__ == "__main__":
    worker.work(Vllm)

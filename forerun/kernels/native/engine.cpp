// The C interface: threads, memory, running a program. One pool of our own: workers spin for a short while between
// operations, then sleep until the next pass.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include <cpuid.h>
#include <immintrin.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "automaton.h"
#include "formats.h"
#include "retrieval.h"
#include "rounds.h"
#include "successors.h"

extern "C" void forerun_run(const Program *program, const Batch *batch);
extern "C" void forerun_chain(const Program *program, const Batch *batch, const Chain *chain);

int64_t padded_inputs(int inputs) { return (inputs + GROUP8 - 1) / GROUP8 * GROUP8; }

namespace {

bool has_avxvnni() {  // from cpuid: older compilers do not know the feature's name
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

bool has_amx() {  // and the system lets this process use it
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3) return false;  // AMX-TILE and AMX-INT8
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, which older headers do not know
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

const Variant *choose(const char *name) {
  __builtin_cpu_init();
  const Variant *usable[10] = {};
  int n = 0;
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
    if (__builtin_cpu_supports("avx512bf16")) {
#if !defined(WITHOUT_AMX)
      if (has_amx() && amx_variant->works()) usable[n++] = amx_variant;
#endif
      usable[n++] = avx512_variant;
    }
    usable[n++] = avx512vnni_variant;
  }
#if !defined(WITHOUT_AVXVNNI)
  if (avx2 && has_avxvnni()) usable[n++] = avxvnni_variant;
#endif
  if (avx2) usable[n++] = avx2_variant;
  usable[n++] = portable_variant;
#if defined(EMULATED)  // for tests: usable on every processor, never chosen as the best
  for (const Variant *emulated : {amx_variant, avx512_variant, avx512vnni_variant, avxvnni_variant})
    if (emulated->works()) usable[n++] = emulated;
#endif
  for (int i = 0; i < n; i++)
    if (!name || !*name || !strcmp(name, usable[i]->name)) return usable[i];
  return nullptr;
}

const Variant *active = nullptr;

int phases(const Op *op) { return op->kind == LINEAR ? 2 : 1; }

// The number of items of a phase. Results do not depend on it: nothing is summed across items.
int items(const Op *op, const Batch *b, int phase, int threads) {
  if (threads == 1) return 1;
  int rows = op->wanted ? b->wanted : b->tokens, most = 4 * threads, n = rows;
  const bool product = op->kind == LINEAR && phase == 1;
  if (op->kind == READ || product) n = (op->matrix.outputs + BLOCK - 1) / BLOCK;
  if (op->kind == ATTEND || op->kind == RECUR || (product && op->experts)) n = most;
  return n < 1 ? 1 : n < most ? n : most;
}

// A phase is divided among the threads; a thread that is through with its share takes from the others', so that one that the
// system has put aside holds them up by one item at most. The thread that finishes the last item opens the next phase. Workers
// spin a while, then sleep. Threads may be far from each other: what they all write, they write once a phase.
class Pool {
 public:
  explicit Pool(int threads) : threads_(threads), shares_(threads) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
  }
  ~Pool() {
    stop_.store(true);
    wake();
    for (auto &w : workers_) w.join();
  }
  int threads() const { return threads_; }
  void run(const Variant *variant, const Program *program, const Batch *batch) {
    variant_ = variant, program_ = program, batch_ = batch, job_ = nullptr;
    begin();
    open(0, 0);
    finish();
  }
  // Call `job` with each number below `count`, in any order, on all threads.
  void each(int count, const std::function<void(int)> &job) {
    job_ = &job;
    begin();
    publish(0, 0, count);
    finish();
  }
  // Workers that wait for the next pass sleep at once, until it comes: others need the cores.
  void rest() { resting_.store(true, std::memory_order_relaxed); }

 private:
  static constexpr int SPINS = 16000;
  static constexpr uint64_t LEFT = (1 << 24) - 1;  // bits of a share that count the items not yet taken
  struct alignas(64) Taken { std::atomic<uint64_t> state{0}; };

  void begin() {
    resting_.store(false, std::memory_order_relaxed);
    finished_.store(false, std::memory_order_relaxed);
  }
  void finish() {
    for (int spins = 0; !finished_.load(std::memory_order_acquire);) {
      if (help(0)) spins = 0;
      else if (++spins < SPINS) _mm_pause();
      else std::this_thread::yield();
    }
  }

  // A thread whose item is not counted as done keeps the phase open, so the phase can be read without a lock.
  bool help(int me) {
    int done = 0, all = 0;
    for (int i = 0; i < threads_; i++) {
      int owner = (me + i) % threads_;
      std::atomic<uint64_t> &state = shares_[owner].state;
      for (uint64_t s = state.load(std::memory_order_acquire); s & LEFT;) {
        if (!state.compare_exchange_weak(s, s - 1, std::memory_order_acq_rel)) continue;
        all = items_, done++;
        int item = share(all, owner, threads_).to - (int)(s & LEFT);
        if (job_) (*job_)(item);
        else variant_->op(program_, program_->ops + op_, batch_, item, all, phase_);
        s = state.load(std::memory_order_acquire);
      }
    }
    if (done && done_.fetch_add(done, std::memory_order_acq_rel) + done == all) next();
    return done;
  }
  void next() {
    if (job_) finished_.store(true, std::memory_order_release);
    else if (phase_ + 1 < phases(program_->ops + op_)) open(op_, phase_ + 1);
    else open(op_ + 1, 0);
  }
  // Phases of one item are done on the way.
  void open(int op, int phase) {
    for (; op < program_->count; op++, phase = 0)
      for (; phase < phases(program_->ops + op); phase++) {
        int n = items(program_->ops + op, batch_, phase, threads_);
        if (n > 1) return publish(op, phase, n);
        variant_->op(program_, program_->ops + op, batch_, 0, 1, phase);
      }
    finished_.store(true, std::memory_order_release);
  }
  void publish(int op, int phase, int n) {
    op_ = op, phase_ = phase, items_ = n;
    done_.store(0, std::memory_order_relaxed);
    phases_ += LEFT + 1;  // a number that was never used before
    for (int i = 0; i < threads_; i++) {
      Share part = share(n, i, threads_);
      shares_[i].state.store(phases_ + (uint64_t)(part.to - part.from));
    }
    if (parked_.load()) wake();
  }
  void wake() {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  bool waiting() const {
    for (const Taken &taken : shares_)
      if (taken.state.load() & LEFT) return true;
    return false;
  }
  void work(int me) {
    for (int spins = 0; !stop_.load(std::memory_order_relaxed);) {
      if (help(me)) spins = 0;
      else if (++spins < SPINS && !resting_.load(std::memory_order_relaxed)) _mm_pause();
      else {
        std::unique_lock<std::mutex> lock(mutex_);
        parked_.fetch_add(1);
        wake_.wait(lock, [&] { return stop_.load() || waiting(); });
        parked_.fetch_sub(1);
        spins = 0;
      }
    }
  }

  int threads_;
  std::vector<Taken> shares_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<int> parked_{0};
  std::atomic<bool> finished_{true}, stop_{false}, resting_{false};
  const Variant *variant_ = nullptr;
  const Program *program_ = nullptr;
  const Batch *batch_ = nullptr;
  const std::function<void(int)> *job_ = nullptr;  // instead of a program
  int op_ = 0, phase_ = 0, items_ = 0;
  uint64_t phases_ = 0;
};

Pool *pool = nullptr;
int pool_threads = 1;
std::mutex passing;  // one pass of the common pool at a time, whichever Python thread asks

// A Python thread that shares the cores with another has a pool of its own, and its passes go on beside the other's.
struct Own {
  std::unique_ptr<Pool> pool;
  bool used = false;
};
thread_local Own own;

// Weights lie one behind the other in slabs on huge pages, where the system has them: a page of 2 MB for each small matrix
// would waste much. A slab is freed with the last matrix in it.
class Memory {
 public:
  void *take(int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    bytes = (bytes + 63) / 64 * 64;
    if (bytes > LARGE) {  // a slab of its own, whose last pages are small ones: the end of a huge one would be wasted
      Slab *own = fresh((bytes + HEADER + PAGE - 1) / PAGE * PAGE);
      return own ? place(own, bytes) : nullptr;
    }
    if (!current_ || current_->used + bytes > SLAB) {
      Slab *next = fresh(SLAB);
      if (!next) return nullptr;
      current_ = next;
    }
    return place(current_, bytes);
  }
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }
  void give(void *p) {
    std::lock_guard<std::mutex> lock(mutex_);
    Slab *slab = (Slab *)((uintptr_t)p & ~(uintptr_t)(SLAB - 1));  // it is aligned so, and matrices begin within SLAB bytes
    if (--slab->taken) return;
    if (slab == current_) current_ = nullptr;
    free(slab);
  }

 private:
  struct Slab { int64_t used, taken; };
  static constexpr int64_t SLAB = 32 << 20, LARGE = SLAB / 8, PAGE = 4 << 10, HEADER = 64;
  static Slab *fresh(int64_t size) {
    void *p = nullptr;
    if (posix_memalign(&p, SLAB, size)) return nullptr;
    madvise(p, size, MADV_HUGEPAGE);
    return new (p) Slab{HEADER, 0};
  }
  static void *place(Slab *slab, int64_t bytes) {
    void *p = (char *)slab + slab->used;
    slab->used += bytes;
    slab->taken++;
    return p;
  }
  std::mutex mutex_;
  Slab *current_ = nullptr;
};
Memory memory;

// A forked child has none of the pool's threads: it begins another with its first pass.
void before_fork() { passing.lock(), memory.lock(); }
void after_fork() { memory.unlock(), passing.unlock(); }
void in_child() {
  pool = nullptr;
  (void)own.pool.release();
  after_fork();
}
const int at_fork = pthread_atfork(before_fork, after_fork, in_child);

// The calling thread's pool: call `use` with it while no other pass runs on it.
template <class Use> void with_pool(const Use &use) {
  if (own.used) return use(*own.pool);
  std::lock_guard<std::mutex> lock(passing);
  if (!pool) pool = new Pool(pool_threads);
  use(*pool);
}

// Call `job` for each row. A row of a large vocabulary takes a tenth of a millisecond.
template <class Job> void each_row(int rows, const Job &job) {
  if (rows > 1) with_pool([&](Pool &pool) { pool.each(rows, job); });
  else if (rows == 1) job(0);
}

// The number of logits of tokens that can be sampled: those are in order.
int num_candidates(const Chain *chain) {
  if (!chain->ids) return chain->vocab;
  int count = chain->num_ids;
  while (count && chain->ids[count - 1] >= chain->vocab) count--;
  return count;
}

// A token for each of the first rows of a pass.
void sample_all(
    const Program *program, const Batch *batch, const Chain *chain, int rows, const uint64_t *keys, int64_t *tokens
) {
  const int count = num_candidates(chain);
  each_row(rows, [&](int r) {
    const float *row = at(program, batch, chain->logits, r);
    tokens[r] = std::max<int64_t>(active->sample(row, count, chain->sampling[r], keys[r], chain->ids), 0);
  });  // logits that are not finite: any draft is valid
}

// The confidence bin of a sampled token, and the likeliest alternatives with theirs: probabilities among the drafter's likeliest
// tokens, with the noise that the target draws with. A sampled token that is not one of them is in the lowest bin.
int rate_token(
    const float *logits, const Chain *chain, int64_t sampled, float temperature, uint64_t key, int64_t *alternatives, int8_t *bins
) {
  int32_t tokens[NUM_SUCCESSORS];
  float logs[NUM_SUCCESSORS];
  double chance[NUM_SUCCESSORS];
  std::fill(alternatives, alternatives + NUM_ALTERNATIVES, -1);
  if (!active->rank(logits, num_candidates(chain), tokens, logs)) return 0;
  for (int i = 0; i < NUM_SUCCESSORS && chain->ids; i++)
    if (tokens[i] >= 0) tokens[i] = (int32_t)chain->ids[tokens[i]];
  const int index = (int)(std::find(tokens, tokens + NUM_SUCCESSORS, (int32_t)sampled) - tokens);
  if (index == NUM_SUCCESSORS) return 0;
  chances(tokens, logs, temperature, temperature > 0 ? &key : nullptr, chance);
  const int own = std::min((int)(chance[index] * CONFIDENCE_BINS), CONFIDENCE_BINS - 1);
  chance[index] = 0;
  for (int found = 0; found < NUM_ALTERNATIVES; found++) {
    const int next = (int)(std::max_element(chance, chance + NUM_SUCCESSORS) - chance);
    if (!(chance[next] > 0)) break;
    alternatives[found] = tokens[next], bins[found] = std::min((int)(chance[next] * CONFIDENCE_BINS), CONFIDENCE_BINS - 1);
    chance[next] = 0;
  }
  return own;
}

// Rate the tokens that were just sampled with these keys; returns whether any chain goes on.
bool goes_on(
    const Program *program, const Batch *batch, const Chain *chain, int level, int rows, const uint64_t *keys,
    std::vector<float> &chance
) {
  const int64_t first = (int64_t)level * chain->rows;
  each_row(rows, [&](int r) {
    if (chance[r] < chain->floors[r]) return;  // it has stopped
    const int64_t i = first + r;
    const int bin = rate_token(
        at(program, batch, chain->logits, r), chain, chain->tokens[i], chain->sampling[r].temperature, keys[r],
        chain->alternatives + i * NUM_ALTERNATIVES, chain->alternative_bins + i * NUM_ALTERNATIVES
    );
    chain->bins[i] = bin;
    chance[r] *= chain->acceptance[bin];
    chain->counts[r] = level;
  });
  bool any = false;
  for (int r = 0; r < rows; r++) any |= chance[r] >= chain->floors[r];
  return any;
}

// A copy of a row of logits in which forbidden tokens are -inf; the next call of the thread overwrites it.
const float *allowed(const float *row, int vocab, const uint8_t *mask, int mask_bytes) {
  static thread_local std::vector<float> copy;
  copy.assign(row, row + vocab);
  const int last = std::min(vocab / 8, mask_bytes);  // bytes of 8 tokens
  for (int i = 0; i < last; i++) {
    if (mask[i] == 0xff) continue;
    for (int bit = 0; bit < 8; bit++)
      if (!(mask[i] >> bit & 1)) copy[8 * i + bit] = -INFINITY;
  }
  for (int token = 8 * last; token < std::min(vocab, 8 * mask_bytes); token++)
    if (!(mask[token / 8] >> token % 8 & 1)) copy[token] = -INFINITY;
  return copy.data();
}

// Move the states of the last tokens of the first pass to the rows of the chain's next pass.
void gather(const Program *program, const Chain *chain) {
  const int width = program->widths[chain->state], hidden = program->widths[0];
  std::vector<float> states((size_t)chain->rows * width);
  for (int r = 0; r < chain->rows; r++) {
    memcpy(&states[(size_t)r * width], at(program, chain->first, chain->state, chain->last[r]), width * sizeof(float));
    memcpy(chain->hidden + (size_t)r * hidden, at(program, chain->first, 0, chain->last[r]), hidden * sizeof(float));
  }
  memcpy(at(program, chain->first, chain->state, 0), states.data(), states.size() * sizeof(float));
}

// Where the rounds of a request are: tokens of the text, committed rows of the target and the head, and the states that the
// head has not read, `unread` of them from `first` on.
struct Progress {
  int count, length, head_length, first, unread;
};

uint64_t key_at(const Rounds &r, int position) { return mix(r.noise + GOLDEN * (uint64_t)(position + 1)); }

// The states that a head has not read go into the buffers of its first pass.
void give_states(const Rounds &r, const Head &head, const Progress &now) {
  for (int k = 0; k < r.layers; k++) {
    const int width = r.target->widths[r.logits + 1 + k];
    const bool apart = head.inputs == r.layers;
    for (int i = 0; i < now.unread; i++) {
      float *to = at(head.begin, head.batch, head.input + (apart ? k : 0), i) + (apart ? 0 : k * width);
      memcpy(to, r.states[k] + (int64_t)(now.first + i) * width, (size_t)width * sizeof(float));
    }
  }
}

// Draft a chain of so many levels behind the first token.
void draft_chain(const Rounds &r, const Head &head, int levels, const Progress &now, Round &round) {
  SlotPass reading(*head.batch, head.line, now.unread), level(*head.batch, head.line, levels);
  for (int i = 0; i < now.unread; i++) {
    const int row = now.head_length + i;
    reading.token(i, r.text[now.count - now.unread + i], row, head.line[row], row + 1);
  }
  for (int i = 0; i < levels; i++) {
    const int row = now.head_length + now.unread + i;
    level.token(i, 0, row, head.line[row], row + 1);
  }
  give_states(r, head, now);
  const size_t drawn = (size_t)levels + 1;
  std::vector<int64_t> tokens(drawn), alternatives(drawn * NUM_ALTERNATIVES);
  std::vector<int8_t> bins(drawn), alternative_bins(drawn * NUM_ALTERNATIVES);
  std::vector<uint64_t> keys(drawn);
  std::vector<int32_t> active_rows(drawn, 1);
  std::vector<float> hidden((size_t)head.step->widths[0]);
  for (size_t i = 0; i < drawn; i++) keys[i] = key_at(r, now.count + (int)i);
  const int32_t last = now.unread - 1;
  int32_t counted = levels;
  Chain chain{};
  chain.levels = levels, chain.rows = 1, chain.logits = r.logits, chain.vocab = head.vocab;
  chain.active = active_rows.data(), chain.sampling = &r.sampling, chain.keys = keys.data() + 1, chain.tokens = tokens.data();
  chain.ids = head.ids, chain.num_ids = head.num_ids, chain.state = head.state;
  chain.begin = head.begin, chain.first = reading.batch(last, 1), chain.last = &last, chain.first_keys = keys.data();
  chain.hidden = hidden.data(), chain.acceptance = head.acceptance, chain.floors = &head.floor;
  chain.bins = bins.data(), chain.alternatives = alternatives.data(), chain.alternative_bins = alternative_bins.data(), chain.counts = &counted;
  forerun_chain(head.step, level.batch(0, std::min(levels, 1)), &chain);
  order_nodes(head, tokens.data(), bins.data(), alternatives.data(), alternative_bins.data(), counted + 1, round);
}

// Verify a draft and commit what is accepted; false, with nothing done, where logits are not finite.
bool verify_and_commit(const Rounds &r, Progress &now, Round &round) {
  SlotPass pass = tree_pass(r, round, now.count, now.length);
  const int rows = 1 + round.verified;
  const Batch *b = pass.batch(0, rows);
  forerun_run(r.target, b);
  std::vector<int64_t> drawn((size_t)rows);
  each_row(rows, [&](int i) {
    const uint64_t key = key_at(r, now.count + (int)pass.positions[i] - now.length);
    drawn[i] = active->sample(at(r.target, b, r.logits, i), r.target->widths[r.logits], r.sampling, key, nullptr);
  });
  if (*std::min_element(drawn.begin(), drawn.end()) < 0) return false;
  const int begins = now.first + now.unread;  // of the states of this round's tokens
  for (int node = 0; node >= 0; round.accepted++) {
    const int index = round.accepted;
    if (index) round.path[index - 1] = node;
    if (node != index) {
      const int64_t from = r.line[now.length + node], to = r.line[now.length + index];
      if (b->kv_format == F32) move_row<uint32_t>(*b, r.layouts, from, to);
      else move_row<uint16_t>(*b, r.layouts, from, to);
    }
    for (int k = 0; k < r.layers; k++) {
      const int width = r.target->widths[r.logits + 1 + k];
      memcpy(r.states[k] + (int64_t)(begins + index) * width, at(r.target, b, r.logits + 1 + k, node), (size_t)width * sizeof(float));
    }
    round.drawn[index] = (int32_t)drawn[node];
    int next = node + 1;
    while (next < rows && !(round.parents[next - 1] == node && round.tokens[next - 1] == drawn[node])) next++;
    node = next < rows ? next : -1;
  }
  round.accepted--;  // without the root
  const int rows_kept = round.accepted + 1;
  now.length += rows_kept;
  if (round.nodes) now.head_length += now.unread, now.first = begins, now.unread = 0;
  now.unread += rows_kept;
  return true;
}

// Whether the last tokens occurred before, so that what followed them might be copied.
bool may_copy(const Rounds &r, const Progress &now) {
  return std::any_of(r.grams, r.grams + r.num_grams, [&](const Grams *grams) { return occurs(*grams, r.text, now.count); });
}

// Append what was drawn to the text, up to what ends it; true if that happens.
bool append(const Rounds &r, Progress &now, Round &round) {
  for (round.appended = 0; round.appended <= round.accepted;) {
    if (r.num_grams) add(*r.grams[0], r.text, now.count);
    const int64_t token = round.drawn[round.appended++];
    r.text[now.count++] = token;
    if (now.count >= r.limit || std::find(r.ends, r.ends + r.num_ends, token) != r.ends + r.num_ends) return true;
  }
  return false;
}

}  // namespace

extern "C" {

// Choose the instruction set by name ("" for the best) and the number of threads; returns its name, or null.
const char *forerun_start(const char *name, int threads) {
  const Variant *chosen = choose(name);
  if (!chosen) return nullptr;
  active = chosen;
  if (!pool || pool->threads() != threads) {
    delete pool;
    pool = new Pool(pool_threads = threads);
  }
  return active->name;
}

// From now on the passes of this Python thread have a pool of so many threads of their own; 0: the common one again.
void forerun_share(int threads) {
  own.used = threads > 0;
  if (!own.used) return;
  if (!own.pool || own.pool->threads() != threads) own.pool.reset(new Pool(threads));
  std::lock_guard<std::mutex> lock(passing);
  if (pool) pool->rest();
}

void forerun_run(const Program *program, const Batch *batch) {
  with_pool([&](Pool &pool) { pool.run(active, program, batch); });
}

// Draft token by token: a pass, a draw for each of its rows, a pass over what was drawn.
void forerun_chain(const Program *program, const Batch *batch, const Chain *chain) {
  Batch b = *batch;
  int levels = chain->levels;
  std::vector<float> chance(chain->rows, 1);
  if (chain->first) {
    forerun_run(chain->begin, chain->first);
    sample_all(program, chain->first, chain, chain->rows, chain->first_keys, chain->tokens);
    if (chain->acceptance && !goes_on(program, chain->first, chain, 0, chain->rows, chain->first_keys, chance)) levels = 0;
    gather(program, chain);
  }
  for (int level = 0; level < levels; level++) {
    int64_t *tokens = chain->tokens + (int64_t)level * chain->rows;
    b.ids = tokens;
    b.tokens = b.wanted = chain->active[level];
    forerun_run(program, &b);
    const uint64_t *keys = chain->keys + (int64_t)level * chain->rows;
    sample_all(program, &b, chain, b.tokens, keys, tokens + chain->rows);
    if (chain->acceptance && !goes_on(program, &b, chain, level + 1, b.tokens, keys, chance)) break;
    b.positions += chain->rows, b.store += chain->rows, b.direct += chain->rows;
  }
}

// Draft from one pass, whose logits lie level by level: a draw for each row of a level, behind what its program of `follow`,
// unless that is null, makes of its logits with the tokens of the level before.
void forerun_block(const Program *program, const Batch *batch, const Program *const *follow, const Chain *chain) {
  std::vector<float> chance(chain->rows, 1);
  std::vector<float *> buffers(batch->buffers, batch->buffers + program->buffers);
  Batch b = *batch;
  b.buffers = buffers.data();
  if (chain->first) forerun_run(chain->begin, chain->first);
  forerun_run(program, batch);
  for (int level = 0; level < chain->levels; level++) {
    int64_t *tokens = chain->tokens + (int64_t)level * chain->rows;
    b.ids = tokens;
    b.tokens = chain->active[level];
    if (follow) forerun_run(follow[level], &b);
    const uint64_t *keys = chain->keys + (int64_t)level * chain->rows;
    sample_all(program, &b, chain, b.tokens, keys, tokens + chain->rows);
    if (chain->acceptance && !goes_on(program, &b, chain, level + 1, b.tokens, keys, chance)) break;
    buffers[chain->logits] += (int64_t)b.tokens * program->widths[chain->logits];
  }
}

// Run rounds of one request until the text ends, a copy might pay, their number is reached or their time is up; returns how
// many were run. A round whose logits are not finite is left to Python, which reports it.
int forerun_rounds(const Rounds *rounds) {
  const Rounds &r = *rounds;
  Progress now{r.count, r.count - 1, r.head ? r.head->length : 0, 0, r.unread};
  const double began = clock_of(CLOCK_MONOTONIC);
  for (int done = 0; done < r.most; done++) {
    const double start = clock_of(CLOCK_MONOTONIC);
    if (done && (start - began > r.seconds || may_copy(r, now))) return done;
    Round &round = r.rounds[done];
    round.nodes = round.verified = round.accepted = 0;
    const double first = clock_of(CLOCK_THREAD_CPUTIME_ID);
    const int room = r.limit - now.count - 1;  // drafted tokens that may follow
    if (r.head && room > 0) draft_chain(r, *r.head, std::min(r.head->levels, room - 1), now, round);
    const double second = clock_of(CLOCK_THREAD_CPUTIME_ID);
    if (!verify_and_commit(r, now, round)) return done;
    const bool ended = append(r, now, round);
    round.draft_seconds = second - first;
    round.verify_seconds = clock_of(CLOCK_THREAD_CPUTIME_ID) - second;
    round.wall_seconds = clock_of(CLOCK_MONOTONIC) - start;
    if (ended) return done + 1;
  }
  return r.most;
}

// Run rounds of several requests that draft nothing, as `forerun_rounds`, until the text of one ends; returns how many were
// run. All have the program, the memory and the bounds of the first one.
int forerun_plain_rounds(const Rounds *requests, int count) {
  const Rounds &first = *requests;
  std::vector<Progress> now;
  for (const Rounds *r = requests; r < requests + count; r++) now.push_back({r->count, r->count - 1, 0, 0, 0});
  std::vector<int64_t> drawn((size_t)count);
  const double began = clock_of(CLOCK_MONOTONIC);
  for (int done = 0; done < first.most; done++) {
    const double start = clock_of(CLOCK_MONOTONIC), used = clock_of(CLOCK_THREAD_CPUTIME_ID);
    bool stops = done && start - began > first.seconds;
    for (int i = 0; i < count && done && !stops; i++) stops = may_copy(requests[i], now[i]);
    if (stops) return done;
    SlotPass pass(*first.batch, nullptr, count);
    for (int i = 0; i < count; i++) {
      const Rounds &r = requests[i];
      pass.rows[i] = r.line;
      pass.token(i, r.text[now[i].count - 1], now[i].length, r.line[now[i].length], now[i].length + 1);
    }
    const Batch *b = pass.batch(0, count);
    forerun_run(first.target, b);
    each_row(count, [&](int i) {
      const int vocab = first.target->widths[first.logits];
      drawn[i] = active->sample(at(first.target, b, first.logits, i), vocab, requests[i].sampling, key_at(requests[i], now[i].count), nullptr);
    });
    if (*std::min_element(drawn.begin(), drawn.end()) < 0) return done;
    bool ended = false;
    for (int i = 0; i < count; i++) {
      const Rounds &r = requests[i];
      Round &round = r.rounds[done];
      round.nodes = round.verified = round.accepted = 0;
      round.drawn[0] = (int32_t)drawn[i];
      for (int k = 0; k < r.layers; k++) {
        const int width = first.target->widths[first.logits + 1 + k];
        memcpy(r.states[k] + (int64_t)done * width, at(first.target, b, first.logits + 1 + k, i), (size_t)width * sizeof(float));
      }
      now[i].length++;
      ended |= append(r, now[i], round);
    }
    for (const Rounds *r = requests; r < requests + count; r++) {
      Round &round = r->rounds[done];
      round.draft_seconds = 0;
      round.verify_seconds = clock_of(CLOCK_THREAD_CPUTIME_ID) - used;
      round.wall_seconds = clock_of(CLOCK_MONOTONIC) - start;
    }
    if (ended) return done + 1;
  }
  return first.most;
}

// Add the sequences of tokens of a text that end behind `first` to `last` of its tokens.
void forerun_add_grams(const Grams *grams, const int64_t *text, int first, int last) {
  for (int i = first; i <= last; i++) add(*grams, text, i);
}

Automaton *forerun_automaton() { return new Automaton; }
void forerun_drop_automaton(Automaton *automaton) { delete automaton; }

// Append tokens; `match` becomes the length and the last token of the earlier occurrence of the text's end.
void forerun_extend(Automaton *automaton, const int64_t *tokens, int count, int32_t *match) {
  for (int i = 0; i < count; i++) automaton->append((int32_t)tokens[i]);
  match[0] = automaton->match_length, match[1] = automaton->match_end;
}

void forerun_follow(const Automaton *automaton, Automaton::Cursor *cursor, const int64_t *tokens, int count) {
  for (int i = 0; i < count; i++) automaton->follow(*cursor, (int32_t)tokens[i]);
}

int forerun_occurrence(const Automaton *automaton, int state) { return automaton->end(state); }

void forerun_pack(int format, const float *source, int outputs, int inputs, void *weight, void *scale) {
  active->pack(format, source, outputs, inputs, weight, scale);
}

// Rows of a file's blocks, one for each output, to packed ones; whether all scales are finite.
bool forerun_repack(int type, int format, const uint8_t *const *rows, int outputs, int inputs, void *weight, void *scale) {
  return active->repack(type, format, rows, outputs, inputs, weight, scale);
}

// Bytes of the weights and of the scales of a packed matrix; outputs and inputs are padded.
int64_t forerun_bytes(int format, int64_t outputs, int padded) { return outputs * padded * layout(format).bits / 8; }
int64_t forerun_scales(int format, int64_t outputs, int padded) {
  return format == INT8 ? outputs * sizeof(float) : outputs / BLOCK * scale_bytes(format, padded);
}

// Rows of a packed matrix as floats [count][inputs].
void forerun_unpack(const Matrix *matrix, const int64_t *outputs, int count, float *to) {
  for (int i = 0; i < count; i++) active->unpack(*matrix, outputs[i], to + (int64_t)i * matrix->inputs);
}

// One draw for each row of scores [rows][vocab], with its own stream of noise.
void forerun_draw(const float *scores, const uint64_t *keys, int rows, int vocab, int64_t *drawn) {
  const Variant *variant = active ? active : choose("");
  each_row(rows, [&](int i) { drawn[i] = variant->draw(scores + (int64_t)i * vocab, vocab, keys[i]); });
}

// One token for each row of logits, each sampled in its own way; returns how many rows were finite until one was not.
// masks, if not null: for each row the allowed tokens, or null where all are; mask_bytes of each, the lowest token in the
// lowest bit. Tokens behind the last bit are allowed.
int forerun_sample(const float *logits, const Sampling *by, const uint64_t *keys, int rows, int vocab, int64_t *sampled,
                const uint8_t *const *masks, int mask_bytes) {
  const Variant *variant = active ? active : choose("");
  each_row(rows, [&](int i) {
    const float *row = logits + (int64_t)i * vocab;
    if (masks && masks[i]) {
      sampled[i] = variant->sample(row, vocab, Sampling{}, 0, nullptr);  // whether it is finite, also where it is forbidden
      if (sampled[i] < 0) return;
      row = allowed(row, vocab, masks[i], mask_bytes);
    }
    sampled[i] = variant->sample(row, vocab, by[i], keys[i], nullptr);
  });
  return (int)(std::find_if(sampled, sampled + rows, [](int64_t token) { return token < 0; }) - sampled);
}

// Keep the likeliest successors of each of these pairs: logits [rows][vocab]. Rows that are not finite are left out.
void forerun_learn(const Successors *table, const int32_t *before, const int32_t *tokens, const float *logits, int rows,
                   int vocab) {
  const Variant *variant = active ? active : choose("");
  struct Ranked {
    int32_t next[NUM_SUCCESSORS];
    float logs[NUM_SUCCESSORS];
    bool finite;
  };
  std::vector<Ranked> ranked(rows);
  each_row(rows, [&](int i) {
    Ranked &own = ranked[i];
    own.finite = variant->rank(logits + (int64_t)i * vocab, vocab, own.next, own.logs);
  });
  for (int i = 0; i < rows; i++) {
    if (!ranked[i].finite) continue;
    keep(table, pair_of(before[i], tokens[i]), ranked[i].next, ranked[i].logs);
    keep(table, pair_of(-1, tokens[i]), ranked[i].next, ranked[i].logs);
  }
}

// Keep entries as they are, one after the other.
void forerun_fill(const Successors *table, const uint64_t *keys, const int32_t *tokens, const float *logs, int count) {
  for (int i = 0; i < count; i++) keep(table, keys[i], tokens + i * NUM_SUCCESSORS, logs + i * NUM_SUCCESSORS);
}

// The likeliest nodes behind a text; returns how many there are.
int forerun_branch(const Successors *tables, int count, const Growth *growth, int32_t *tokens, int32_t *parents, int8_t *bins,
                   double *values) {
  return branch(tables, count, *growth, tokens, parents, bins, values);
}

void forerun_sort(const uint32_t *tokens, int64_t count, int64_t vocab, int threads, uint32_t *suffixes, int64_t *starts) {
  sort_suffixes(tokens, count, vocab, threads, suffixes, starts);
}

int forerun_retrieve(const Texts *texts, int count, const uint32_t *text, int length, int shortest, int most, int32_t *to,
                     int *found) {
  return retrieve(texts, count, text, length, shortest, most, to, found);
}

int64_t forerun_padded_inputs(int inputs) { return padded_inputs(inputs); }
int64_t forerun_scratch_row_bytes(int inputs) { return padded_inputs(inputs) * 4 + 64; }  // floats: other formats take less

// Memory for weights, aligned to 64 bytes.
void *forerun_allocate(int64_t bytes) { return memory.take(bytes); }
void forerun_release(void *p) { memory.give(p); }
}

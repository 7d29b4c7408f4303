// The C interface: threads, memory, running a program. One pool of our own: workers spin for a short while between
// operations, then sleep until the next pass.
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include <immintrin.h>
#include <sys/mman.h>

#include "common.h"

int64_t padded_inputs(int inputs) { return (inputs + GROUP8 - 1) / GROUP8 * GROUP8; }

int64_t scratch_row_bytes(int inputs) {
  int64_t padded = padded_inputs(inputs);
  return (padded * 4 + padded / GROUP8 * 4 + padded / GROUP4 * 4 + 63) / 64 * 64;
}

namespace {

const Variant *choose(const char *name) {
  __builtin_cpu_init();
  const Variant *usable[3] = {};
  int n = 0;
  if (avx512_variant && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))
    usable[n++] = avx512_variant;
  if (avx2_variant && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) usable[n++] = avx2_variant;
  usable[n++] = portable_variant;
  for (int i = 0; i < n; i++)
    if (!name || !*name || !strcmp(name, usable[i]->name)) return usable[i];
  return nullptr;
}

const Variant *active = nullptr;

class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto &w : workers_) w.join();
  }
  int threads() const { return threads_; }
  void run(const Program *p, const Batch *b) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      program_ = p, batch_ = b;
      round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    execute(*p, *b, 0);
  }

 private:
  // Takes copies: once the last barrier is passed, the caller may free what it gave us, or set the next round.
  void execute(const Program program, const Batch batch, int id) {
    for (int i = 0; i < program.count; i++) {
      const Op *op = program.ops + i;
      for (int phase = 0, n = active->phases(op); phase < n; phase++) {
        active->op(&program, op, &batch, id, threads_, phase);
        barrier();
      }
    }
  }
  void barrier() {  // sense by generation; nobody leaves before all have come
    if (threads_ == 1) return;
    int generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.fetch_add(1, std::memory_order_release);
      return;
    }
    for (int spins = 0; generation_.load(std::memory_order_acquire) == generation;)
      if (++spins < 2000) _mm_pause();
      else std::this_thread::yield();
  }
  void work(int id) {
    int seen = 0;
    for (;;) {
      for (int spins = 0; spins < 2000 && round_.load(std::memory_order_acquire) == seen; spins++) _mm_pause();
      if (round_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || round_.load() != seen; });
        if (stop_) return;
      }
      seen = round_.load(std::memory_order_acquire);
      execute(*program_, *batch_, id);
    }
  }

  int threads_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> round_{0}, arrived_{0}, generation_{0};
  const Program *program_ = nullptr;
  const Batch *batch_ = nullptr;
  bool stop_ = false;
};

Pool *pool = nullptr;

}  // namespace

extern "C" {

// Choose the instruction set by name ("" for the best) and the number of threads; returns its name, or null.
const char *forerun_start(const char *name, int threads) {
  active = choose(name);
  if (!active) return nullptr;
  if (!pool || pool->threads() != threads) {
    delete pool;
    pool = new Pool(threads);
  }
  return active->name;
}

void forerun_forget_pool() { pool = nullptr; }  // in a forked child the threads are gone

// One pass at a time, whichever Python thread asks.
void forerun_run(const Program *program, const Batch *batch) {
  static std::mutex one;
  std::lock_guard<std::mutex> lock(one);
  pool->run(program, batch);
}

void forerun_pack(int format, const float *source, int outputs, int inputs, void *weight, void *scale) {
  active->pack(format, source, outputs, inputs, weight, scale);
}

// One draw for each row of scores [rows][vocab], with its own stream of noise.
void forerun_draw(const float *scores, const uint64_t *keys, int rows, int vocab, int64_t *drawn) {
  const Variant *variant = active ? active : choose("");
  for (int i = 0; i < rows; i++) drawn[i] = variant->draw(scores + (int64_t)i * vocab, keys[i], vocab);
}

int64_t forerun_padded_inputs(int inputs) { return padded_inputs(inputs); }
int64_t forerun_scratch_row_bytes(int inputs) { return scratch_row_bytes(inputs); }

// Memory for weights: aligned, on huge pages where the system has them.
void *forerun_allocate(int64_t bytes) {
  const int64_t page = 2 << 20;
  bytes = (bytes + page - 1) / page * page;
  void *p = aligned_alloc(page, bytes);
  if (p) madvise(p, bytes, MADV_HUGEPAGE);
  return p;
}
void forerun_release(void *p) { free(p); }
}

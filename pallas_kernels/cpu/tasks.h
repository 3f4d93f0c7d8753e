// Divides a call over the threads of XLA's pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

// Calls body(i) for 0 <= i < count, on the calling thread and on threads of the pool.
//
// Threads draw tasks from a counter, so the calling thread alone finishes all of them if no other
// thread is free: a call cannot deadlock, and a late thread costs nothing. A thread that starts
// after the last task was drawn reads the counter only, which outlives the call.
template <class Body>
void run_tasks(const xla::ffi::ThreadPool& pool, int64_t count, const Body& body) {
  int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; i++) body(i);
    return;
  }
  struct Job {
    std::atomic<int64_t> next{0}, finished{0};
  };
  auto job = std::make_shared<Job>();
  auto work = [job, count, body = &body] {
    for (int64_t i; (i = job->next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      (*body)(i);
      job->finished.fetch_add(1, std::memory_order_release);
    }
  };
  auto schedule = pool;  // a handle
  for (int64_t i = 0; i < helpers; i++) schedule.Schedule([work] { work(); });
  work();
  // Only tasks that another thread has begun are left. Yielding lets it run on a busy machine.
  for (int spins = 0; job->finished.load(std::memory_order_acquire) < count; spins++) {
    if (spins < 4096) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else {
      std::this_thread::yield();
    }
  }
}

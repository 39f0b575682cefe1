// The pool of thread_pool.h. A job lives on its caller's stack; a worker that finds it in the queue counts itself
// in, takes pieces until none is left, and counts itself out; the caller leaves when nobody is inside. That is the
// whole protocol: no futures, no per-piece allocation, and jobs of several callers share the workers.
#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace gemini {
namespace {

// In elements. Pieces are large enough to be worth a thread, and small enough that a thread which loses its processor
// does not hold up the others.
constexpr int64_t kMinPiece = 16 * 1024;
constexpr int64_t kMaxPiece = 256 * 1024;
constexpr int kMaxThreads = 1024;

// The flush-to-zero / denormals-are-zero bits of the floating point control register, which are per thread.
#if defined(__x86_64__)
constexpr unsigned kFlushBits = 0x8040;
unsigned flush_mode() { return _mm_getcsr() & kFlushBits; }
void set_flush_mode(unsigned mode) { _mm_setcsr((_mm_getcsr() & ~kFlushBits) | mode); }
#elif defined(__aarch64__)
constexpr uint64_t kFlushBits = 1ull << 24;
uint64_t control() {
    uint64_t value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
}
unsigned flush_mode() { return static_cast<unsigned>(control() & kFlushBits); }
void set_flush_mode(unsigned mode) { asm volatile("msr fpcr, %0" ::"r"((control() & ~kFlushBits) | mode)); }
#else
unsigned flush_mode() { return 0; }
void set_flush_mode(unsigned) {}
#endif

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Job {
    const RangeTask& task;
    const int64_t n;
    const int64_t piece;
    const unsigned mode;
    std::atomic<int64_t> next{0};
    int inside = 0;            // workers in run(); guarded by the pool's mutex
    std::exception_ptr error;  // the first; guarded by error_mutex
    std::mutex error_mutex;

    Job(const RangeTask& task, int64_t n, int64_t piece) : task(task), n(n), piece(piece), mode(flush_mode()) {}

    void run() {
        for (;;) {
            const int64_t begin = next.fetch_add(piece, std::memory_order_relaxed);
            if (begin >= n) return;
            try {
                task(begin, std::min(begin + piece, n));
            } catch (...) {
                next.store(n, std::memory_order_relaxed);  // nobody starts another piece
                const std::lock_guard<std::mutex> lock(error_mutex);
                if (!error) error = std::current_exception();
            }
        }
    }
};

class ThreadPool {
public:
    std::atomic<int> num_threads{static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))};

    bool usable() const {
        const pid_t owner = owner_.load(std::memory_order_acquire);
        return owner == 0 || owner == getpid();
    }

    void run(Job& job, int num_helpers) {
        owner_.store(getpid(), std::memory_order_release);  // before the mutex: a child must never find it locked
        bool some_sleep_on;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            start_if_needed(num_helpers);
            jobs_.push_back(&job);
            some_sleep_on = num_workers_ >= num_threads;
        }
        if (some_sleep_on) {
            wake_.notify_all();  // a single wake-up could be lost on a worker beyond the current size
        } else {
            for (int i = 0; i < num_helpers; ++i) wake_.notify_one();
        }
        job.run();
        std::unique_lock<std::mutex> lock(mutex_);
        withdraw(job);
        idle_.wait(lock, [&] { return job.inside == 0; });
    }

private:
    void start_if_needed(int num_workers) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // workers inherit it: signals stay with the program's threads
        try {
            for (; num_workers_ < num_workers; ++num_workers_)
                std::thread([this, index = num_workers_] { work(index); }).detach();
        } catch (const std::system_error&) {
            // The process may start no more threads: the caller does what the missing worker would have done.
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void work(int index) {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            // A worker beyond the current size sleeps on.
            wake_.wait(lock, [&] { return !jobs_.empty() && index < num_threads - 1; });
            Job& job = *jobs_.front();
            ++job.inside;
            lock.unlock();
            set_flush_mode(job.mode);
            job.run();
            lock.lock();
            withdraw(job);
            if (--job.inside == 0) idle_.notify_all();  // from here on the job may be gone
        }
    }

    void withdraw(Job& job) {
        const auto found = std::find(jobs_.begin(), jobs_.end(), &job);
        if (found != jobs_.end()) jobs_.erase(found);
    }

    std::atomic<pid_t> owner_{0};  // the process the workers live in; 0 until there are any
    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    std::deque<Job*> jobs_;
    int num_workers_ = 0;
};

// Leaked on purpose: at exit workers may still be asleep in it, and in a forked child there is nobody to join.
ThreadPool& pool() {
    static ThreadPool* const instance = new ThreadPool;
    return *instance;
}

}  // namespace

void parallel_for(int64_t n, int64_t align, const RangeTask& task, int64_t inline_below) {
    if (n <= 0) return;
    const int threads = num_threads();
    if (n < inline_below || threads == 1 || !pool().usable()) return task(0, n);
    const int64_t share = std::clamp(divide_up(n, threads), kMinPiece, kMaxPiece);
    const int64_t piece = divide_up(share, align) * align;
    Job job(task, n, piece);
    const int64_t num_pieces = divide_up(n, piece);
    pool().run(job, static_cast<int>(std::min<int64_t>(threads, num_pieces)) - 1);
    if (job.error) std::rethrow_exception(job.error);
}

void set_num_threads(int num_threads) { pool().num_threads = std::min(std::max(num_threads, 1), kMaxThreads); }

int num_threads() { return pool().num_threads; }

}  // namespace gemini

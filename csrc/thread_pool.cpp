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
unsigned read_mode() { return _mm_getcsr() & kFlushBits; }
void write_mode(unsigned mode) { _mm_setcsr((_mm_getcsr() & ~kFlushBits) | (mode & kFlushBits)); }
#elif defined(__aarch64__)
constexpr uint64_t kFlushBits = 1ull << 24;
uint64_t control() {
    uint64_t value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
}
unsigned read_mode() { return static_cast<unsigned>(control() & kFlushBits); }
void write_mode(unsigned mode) { asm volatile("msr fpcr, %0" ::"r"((control() & ~kFlushBits) | (mode & kFlushBits))); }
#else
unsigned read_mode() { return 0; }
void write_mode(unsigned) {}
#endif

// The most threads that may share a parallel_for of the calling thread; 0: as many as the pool has.
thread_local int limit_here = 0;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Job {
    const RangeTask& task;
    const int64_t n;
    const int64_t piece;
    const unsigned mode;
    std::atomic<int64_t> next{0};
    int wanted;                // workers that may still come in; it and `inside` are guarded by the pool's mutex
    int inside = 0;            // workers in run()
    std::exception_ptr error;  // the first; guarded by error_mutex
    std::mutex error_mutex;

    Job(const RangeTask& task, int64_t n, int64_t piece, int num_helpers)
        : task(task), n(n), piece(piece), mode(read_mode()), wanted(num_helpers) {}

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

    void run(Job& job) {
        const int num_helpers = job.wanted;  // workers change it once they know of the job
        owner_.store(getpid(), std::memory_order_release);  // before the mutex: a child must never find it locked
        bool some_sleep_on;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            jobs_.push_back(&job);
            int num_workers = num_busy_;
            for (const Job* waiting : jobs_) num_workers += waiting->wanted;
            start_if_needed(std::min(num_workers, num_threads - 1));
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
            ++num_busy_;
            if (--job.wanted == 0) withdraw(job);  // its caller's limit: workers that are free look further
            lock.unlock();
            write_mode(job.mode);
            job.run();
            lock.lock();
            --num_busy_;
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
    int num_workers_ = 0, num_busy_ = 0;
};

// Leaked on purpose: at exit workers may still be asleep in it, and in a forked child there is nobody to join.
ThreadPool& pool() {
    static ThreadPool* const instance = new ThreadPool;
    return *instance;
}

}  // namespace

void parallel_for(int64_t n, int64_t align, const RangeTask& task, int64_t inline_below) {
    if (n <= 0) return;
    const int threads = limit_here == 0 ? num_threads() : std::min(num_threads(), limit_here);
    if (n < inline_below || threads == 1 || !pool().usable()) return task(0, n);
    const int64_t share = std::clamp(divide_up(n, threads), kMinPiece, kMaxPiece);
    const int64_t piece = divide_up(share, align) * align;
    const int num_helpers = static_cast<int>(std::min<int64_t>(threads, divide_up(n, piece))) - 1;
    if (num_helpers == 0) return task(0, n);
    Job job(task, n, piece, num_helpers);
    pool().run(job);
    if (job.error) std::rethrow_exception(job.error);
}

void set_num_threads(int num_threads) { pool().num_threads = std::min(std::max(num_threads, 1), kMaxThreads); }

int num_threads() { return pool().num_threads; }

void limit_threads(int limit) { limit_here = std::max(limit, 0); }

unsigned flush_mode() { return read_mode(); }

void set_flush_mode(unsigned mode) { write_mode(mode); }

}  // namespace gemini

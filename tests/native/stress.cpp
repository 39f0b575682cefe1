// A program for race detectors: the native threads under everything their faces allow, many callers at once, with no
// Python around. It checks results too (each element once, the same bits, every byte back). Not part of the package;
// tests/hunts/native_races.py builds it with ThreadSanitizer and runs it.
//
//     stress FOLDER ROUNDS [race]      `race` adds two threads with a data race, which the detector has to report
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu_grad.h"
#include "cpu_update.h"
#include "nvme_io.h"
#include "thread_pool.h"

using namespace gemini;

namespace {

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "stress: %s\n", what);
    std::_Exit(1);
}

using Random = std::mt19937;

int64_t below(Random& random, int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); }

// Runs work(number, random) on `count` threads, while `meanwhile` is repeated on another one until they have ended.
void together(int count, const std::function<void(int, Random&)>& work, const std::function<void(Random&)>& meanwhile) {
    std::atomic<bool> over{false};
    std::thread beside([&] {
        Random random(1);
        while (!over) meanwhile(random);
    });
    std::vector<std::thread> threads;
    for (int i = 0; i < count; ++i)
        threads.emplace_back([&, i] {
            Random random(100 + static_cast<unsigned>(i));
            work(i, random);
        });
    for (std::thread& thread : threads) thread.join();
    over = true;
    beside.join();
}

void resize_the_pool(Random& random) {
    set_num_threads(1 + static_cast<int>(below(random, 6)));
    std::this_thread::sleep_for(std::chrono::microseconds(200));
}

Isa best() { return runs_here(Isa::avx512) ? Isa::avx512 : runs_here(Isa::avx2) ? Isa::avx2 : Isa::scalar; }

// ---- the pool --------------------------------------------------------------------------------------------------------

// Pieces write plain memory that the caller reads afterwards: whatever is missing between the two is a race.
void cover(Random& random, std::vector<int>& touched) {
    const int64_t n = 1 + below(random, static_cast<int64_t>(touched.size()));
    const unsigned mode = flush_mode();
    parallel_for(n, 1 + below(random, 64), [&](int64_t begin, int64_t end) {
        require(flush_mode() == mode, "a worker had another flush-to-zero mode than its caller");
        for (int64_t i = begin; i < end; ++i) ++touched[static_cast<size_t>(i)];
    });
    for (int64_t i = 0; i < n; ++i) require(touched[static_cast<size_t>(i)] == 1, "an element was not touched once");
    std::fill(touched.begin(), touched.begin() + n, 0);
}

void fail(Random& random, int64_t n) {
    const int64_t at = below(random, n);
    std::string told;
    try {
        parallel_for(n, 1, [&](int64_t begin, int64_t end) {
            if (end > at) throw std::runtime_error("piece from " + std::to_string(begin));
        });
    } catch (const std::runtime_error& error) {
        told = error.what();
    }
    require(told.rfind("piece from ", 0) == 0, "an exception of a piece did not reach its caller");
}

void stress_pool(int rounds) {
    together(6, [&](int number, Random& random) {
        std::vector<int> touched(400'000, 0);
        const unsigned before = flush_mode();
        if (number % 2) set_flush_mode(~0u);
        for (int round = 0; round < rounds; ++round) {
            limit_threads(static_cast<int>(below(random, 5)));
            if (below(random, 4) == 0) {
                fail(random, 300'000);
            } else {
                cover(random, touched);
            }
        }
        set_flush_mode(before);
    }, resize_the_pool);
}

// ---- the kernels -----------------------------------------------------------------------------------------------------

struct State {
    std::vector<uint16_t> weights;
    std::vector<int16_t> residual;
    std::vector<float> exp_avg, exp_avg_sq, grad;
    std::vector<double> sums;

    explicit State(size_t n) : weights(n, 0x3f80), residual(n, 3), exp_avg(n, 0.f), exp_avg_sq(n, 0.f), grad(n) {
        for (size_t i = 0; i < n; ++i) grad[i] = 1e-3f * static_cast<float>(i % 1001) - 0.5f;
    }

    void update(Isa isa) {
        const int64_t n = static_cast<int64_t>(grad.size());
        const Scalars scalars =
            make_scalars("adamw", {0.1f, 0.001f, 0.999f, 0.9999f, 0.01f, -1e-3f, 1.f, 1e-8f, 1.f});
        std::vector<float> arrived(grad.size()), master(grad.size());
        sums = copy_grad(isa, arrived.data(), Dtype::f32, grad.data(), Dtype::f32, n);
        const std::vector<double> twice = accumulate_grad(isa, arrived.data(), grad.data(), Dtype::f32, n);
        sums.insert(sums.end(), twice.begin(), twice.end());
        const Arrays arrays{weights.data(), residual.data(), arrived.data(), 2, {exp_avg.data(), exp_avg_sq.data()}};
        ::gemini::update(isa, arrays, Dtype::f32, n, scalars);
        join_master(isa, weights.data(), residual.data(), master.data(), n);
        split_master(isa, master.data(), weights.data(), residual.data(), n);
    }
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

void stress_kernels(int rounds) {
    const Isa isa = best();
    State expected(600'001);
    limit_threads(1);
    expected.update(isa);
    limit_threads(0);
    together(3, [&](int, Random& random) {
        for (int round = 0; round < rounds; ++round) {
            limit_threads(static_cast<int>(below(random, 4)));
            State mine(600'001);
            mine.update(isa);
            require(same_bits(mine.weights, expected.weights) && same_bits(mine.residual, expected.residual) &&
                        same_bits(mine.exp_avg, expected.exp_avg) && same_bits(mine.exp_avg_sq, expected.exp_avg_sq) &&
                        same_bits(mine.sums, expected.sums),
                    "threads changed the bits of an update");
        }
    }, resize_the_pool);
}

// ---- the queue -------------------------------------------------------------------------------------------------------

constexpr size_t kBlock = size_t{4} << 20;

int open_file(const std::string& folder) {
    const std::string name = folder + "/stress.bin";
    const int fd = open(name.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
    require(fd >= 0, "no file could be made in the given folder");
    unlink(name.c_str());
    return fd;
}

template <class Error>
bool throws(const std::function<void()>& call) {
    try {
        call();
    } catch (const Error&) {
        return true;
    }
    return false;
}

void wait_somehow(IoQueue& queue, uint64_t ticket, Random& random) {
    for (int64_t polls = below(random, 20); polls > 0 && !queue.done(ticket); --polls) std::this_thread::yield();
    queue.wait(ticket);
}

void round_trip(IoQueue& queue, int fd, int number, Random& random, std::vector<char>& there, std::vector<char>& back) {
    const size_t size = below(random, 3) == 0 ? there.size() : static_cast<size_t>(1 + below(random, 100'000));
    const int64_t at = number * static_cast<int64_t>(2 * kBlock);
    std::fill(there.begin(), there.begin() + static_cast<int64_t>(size), static_cast<char>(random()));
    wait_somehow(queue, queue.submit_write(fd, there.data(), size, at, below(random, 2) == 0), random);
    wait_somehow(queue, queue.submit_read(fd, back.data(), size, at, below(random, 2) == 0), random);
    require(std::memcmp(there.data(), back.data(), size) == 0, "a read gave other bytes than were written");
}

void bad_requests(IoQueue& queue, Random& random, std::vector<char>& memory) {
    const bool urgent = below(random, 2) == 0;
    const uint64_t ticket = queue.submit_write(-1, memory.data(), memory.size(), 0, urgent);
    require(throws<IoError>([&] { wait_somehow(queue, ticket, random); }), "a bad descriptor was no error");
    require(throws<std::invalid_argument>([&] { queue.wait(ticket); }), "a ticket was good twice");
}

void stress_queue(const std::string& folder, int rounds) {
    const int fd = open_file(folder);
    IoQueue queue(4);
    together(4, [&](int number, Random& random) {
        std::vector<char> there(kBlock + 5000), back(kBlock + 5000);
        for (int round = 0; round < rounds; ++round) {
            round_trip(queue, fd, number, random, there, back);
            if (round % 3 == 0) bad_requests(queue, random, there);
        }
    }, [&](Random& random) {
        char byte = 7;
        queue.wait(queue.submit_write(fd, &byte, 1, static_cast<int64_t>(20 * kBlock), below(random, 2) == 0));
    });
    close(fd);
}

// Queues end while others wait, poll and submit, and by destruction with everything outstanding.
void stress_closing(const std::string& folder, int rounds) {
    const int fd = open_file(folder);
    std::vector<char> memory(2 * kBlock, 1);
    for (int round = 0; round < rounds; ++round) {
        {
            IoQueue queue(3);
            together(3, [&](int number, Random& random) {
                for (int turn = 0; turn < 4; ++turn) {
                    uint64_t ticket = 0;
                    const auto submit = [&] {
                        ticket = queue.submit_write(fd, memory.data(), memory.size(), number * 1'000'000, turn % 2);
                    };
                    if (throws<std::invalid_argument>(submit)) return;  // closed: what was submitted before is kept
                    wait_somehow(queue, ticket, random);
                    if (turn == number) queue.close();
                }
            }, [&](Random&) {
                require(throws<std::invalid_argument>([&] { queue.done(1'000'000); }), "an unknown ticket was known");
            });
        }
        IoQueue dropped(2);
        for (int i = 0; i < 4; ++i) dropped.submit_write(i == 2 ? -1 : fd, memory.data(), memory.size(), 0, i % 2);
    }
    close(fd);
}

// ---- the control -----------------------------------------------------------------------------------------------------

int raced = 0;

void race_on_purpose() {
    together(2, [](int, Random&) {
        for (int i = 0; i < 1000; ++i) ++raced;
    }, [](Random&) { std::this_thread::yield(); });
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) {
        std::fprintf(stderr, "usage: stress FOLDER ROUNDS [race]\n");
        return 2;
    }
    const std::string folder = argv[1];
    const int rounds = std::atoi(argv[2]);
    if (argc > 3) {
        race_on_purpose();
        return 0;
    }
    stress_pool(4 * rounds);
    std::puts("pool: 6 callers with limits, exceptions and two flush modes, its size changing");
    stress_kernels(rounds / 4 + 1);
    std::puts("kernels: 3 callers of all kernels, the bits of one thread");
    stress_queue(folder, rounds);
    std::puts("queue: 4 clients and a stream, urgent and not, failing descriptors, polling");
    stress_closing(folder, rounds / 4 + 1);
    std::puts("queue: closed under its clients, destroyed with requests outstanding");
    return 0;
}

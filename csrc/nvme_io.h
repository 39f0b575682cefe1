// Reads and writes between raw memory and file descriptors, by blocking pread/pwrite on a few worker threads: with
// O_DIRECT and blocks of 4 MiB this reaches what io_uring and libaio reach, on any kernel and file system. The caller
// keeps fd and memory alive until wait() has returned or thrown for the ticket. For bindings.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace gemini {

// An I/O failure, with its errno; becomes Python's OSError(code, text).
struct IoError : std::runtime_error {
    IoError(int code, const std::string& text) : std::runtime_error(text), code(code) {}
    int code;
};

class IoQueue {
public:
    explicit IoQueue(int num_threads);
    ~IoQueue();  // waits for what was submitted; in a forked child leaves everything alone
    IoQueue(const IoQueue&) = delete;
    IoQueue& operator=(const IoQueue&) = delete;

    // Requests are cut into blocks that all workers share, and start in order of submission, except that every block
    // of an urgent one goes before the blocks of the others that are not yet started. Offsets are in bytes.
    uint64_t submit_read(int fd, void* memory, size_t num_bytes, int64_t offset, bool urgent = false);
    uint64_t submit_write(int fd, const void* memory, size_t num_bytes, int64_t offset, bool urgent = false);

    // Blocks until no worker touches the request's memory any more; throws IoError if any block of it failed. A ticket
    // is good for one wait; std::invalid_argument otherwise.
    void wait(uint64_t ticket);

    // Whether wait() would return or throw at once. The ticket stays good for its one wait; std::invalid_argument for
    // those it would be thrown for there.
    bool done(uint64_t ticket);

    // Completes what was submitted, then ends the workers. Idempotent; submitting afterwards throws, waiting does not.
    void close();

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace gemini

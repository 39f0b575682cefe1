// The queue of nvme_io.h: two lines of requests in order of submission, the urgent and the others; workers take the next
// block of the first urgent one that has any left, or else of the first other one. A failed block stops the blocks not yet started; the first error is kept for wait().
#include "nvme_io.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace gemini {
namespace {

constexpr size_t kBlock = size_t{4} << 20;

struct Request {
    bool write;
    int fd;
    char* memory;
    size_t num_bytes;
    int64_t offset;
    bool urgent;
    size_t taken = 0;       // bytes handed to workers so far
    int blocks_inside = 0;  // blocks being transferred now
    int code = 0;           // errno of the first failure, and what it was about
    std::string text = {};

    bool done() const { return blocks_inside == 0 && taken == num_bytes; }
};

std::string describe(const Request& r) {
    return std::string(r.write ? "write" : "read") + " of " + std::to_string(r.num_bytes) + " bytes at offset " +
           std::to_string(r.offset) + " of file descriptor " + std::to_string(r.fd);
}

// Transfers one block whole: interrupted calls are repeated, short ones continued. Returns the errno and the text.
std::pair<int, std::string> transfer(const Request& r, size_t begin, size_t end) {
    while (begin < end) {
        const int64_t at = r.offset + static_cast<int64_t>(begin);
        const ssize_t moved = r.write ? pwrite(r.fd, r.memory + begin, end - begin, at)
                                      : pread(r.fd, r.memory + begin, end - begin, at);
        if (moved > 0) {
            begin += static_cast<size_t>(moved);
        } else if (moved == 0) {
            struct stat file;
            const int64_t last = fstat(r.fd, &file) == 0 ? std::min<int64_t>(at, file.st_size) : at;
            const std::string ended =
                "the file ends at byte " + std::to_string(last) + ", before the end of the request";
            return {EIO, describe(r) + ": " + (r.write ? "the device accepted no more bytes" : ended)};
        } else if (errno != EINTR) {
            const int code = errno;
            return {code, describe(r) + ": " + strerror(code)};
        }
    }
    return {0, {}};
}

}  // namespace

struct IoQueue::State {
    const pid_t owner = getpid();
    std::mutex mutex;
    std::condition_variable wake, finished;
    std::deque<std::shared_ptr<Request>> urgent, others;  // those with blocks not yet taken
    std::unordered_map<uint64_t, std::shared_ptr<Request>> tickets;
    std::vector<std::thread> workers;
    uint64_t next_ticket = 1;
    bool closing = false;

    void require_owner() const {
        if (getpid() != owner)
            throw std::runtime_error("this IoQueue belongs to process " + std::to_string(owner) +
                                     "; its threads did not follow the fork: make a new one in the child");
    }

    void work() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            wake.wait(lock, [&] { return closing || !urgent.empty() || !others.empty(); });
            auto& line = urgent.empty() ? others : urgent;
            if (line.empty()) return;
            const std::shared_ptr<Request> request = line.front();
            const size_t begin = request->taken;
            const size_t end = std::min(begin + kBlock, request->num_bytes);
            request->taken = end;
            ++request->blocks_inside;
            if (end == request->num_bytes) line.pop_front();
            lock.unlock();
            auto [code, text] = transfer(*request, begin, end);
            lock.lock();
            --request->blocks_inside;
            if (code != 0) fail(*request, code, std::move(text));
            if (request->done()) finished.notify_all();
        }
    }

    void fail(Request& request, int code, std::string text) {
        if (request.code == 0) {
            request.code = code;
            request.text = std::move(text);
        }
        request.taken = request.num_bytes;
        auto& line = line_of(request);
        const auto same = [&](const std::shared_ptr<Request>& other) { return other.get() == &request; };
        line.erase(std::remove_if(line.begin(), line.end(), same), line.end());
    }

    std::deque<std::shared_ptr<Request>>& line_of(const Request& request) { return request.urgent ? urgent : others; }

    // Where the ticket is; throws when there is none.
    auto find(uint64_t ticket) {
        const auto found = tickets.find(ticket);
        if (found == tickets.end())
            throw std::invalid_argument("ticket " + std::to_string(ticket) + " is unknown or was already waited for");
        return found;
    }

    uint64_t submit(Request request) {
        require_owner();
        auto shared = std::make_shared<Request>(std::move(request));
        const std::lock_guard<std::mutex> lock(mutex);
        if (closing) throw std::invalid_argument("this IoQueue is closed");
        tickets.emplace(next_ticket, shared);
        if (!shared->done()) line_of(*shared).push_back(shared);
        wake.notify_all();
        return next_ticket++;
    }

    // Moves the workers out under the lock, so that of two closing threads one joins.
    void close() {
        std::vector<std::thread> ending;
        {
            const std::lock_guard<std::mutex> lock(mutex);
            closing = true;
            ending.swap(workers);
        }
        wake.notify_all();
        for (std::thread& worker : ending) worker.join();
    }
};

IoQueue::IoQueue(int num_threads) : state_(new State) {
    if (num_threads < 1) throw std::invalid_argument("IoQueue needs at least 1 thread");
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals stay with the program's own threads
    try {
        for (int i = 0; i < num_threads; ++i) state_->workers.emplace_back([state = state_.get()] { state->work(); });
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        state_->close();
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

IoQueue::~IoQueue() {
    // In a forked child the threads are not there to join and the mutex may be held for ever: let the state leak.
    if (getpid() != state_->owner) {
        (void)state_.release();
        return;
    }
    state_->close();
}

uint64_t IoQueue::submit_read(int fd, void* memory, size_t num_bytes, int64_t offset, bool urgent) {
    return state_->submit({false, fd, static_cast<char*>(memory), num_bytes, offset, urgent});
}

uint64_t IoQueue::submit_write(int fd, const void* memory, size_t num_bytes, int64_t offset, bool urgent) {
    char* source = static_cast<char*>(const_cast<void*>(memory));  // pwrite only reads it
    return state_->submit({true, fd, source, num_bytes, offset, urgent});
}

void IoQueue::wait(uint64_t ticket) {
    state_->require_owner();
    std::unique_lock<std::mutex> lock(state_->mutex);
    const auto found = state_->find(ticket);
    const std::shared_ptr<Request> request = std::move(found->second);
    state_->tickets.erase(found);
    state_->finished.wait(lock, [&] { return request->done(); });
    if (request->code != 0) throw IoError(request->code, request->text);
}

bool IoQueue::done(uint64_t ticket) {
    state_->require_owner();
    const std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->find(ticket)->second->done();
}

void IoQueue::close() {
    state_->require_owner();
    state_->close();
}

}  // namespace gemini

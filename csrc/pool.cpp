#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace overspill {
namespace {

// Elements of a piece: long enough to make up for taking it (and for memory to be read ahead, where there is much of it),
// short enough that the last ones end together. Powers of two, so that no block is cut.
constexpr std::int64_t SHORTEST = 1 << 14, LONGEST = 1 << 20;
constexpr std::int64_t PIECES = 16;  // of each thread, at least, between these two

std::int64_t piece_of(std::int64_t count, int threads) {
    std::int64_t piece = LONGEST;
    while (piece > SHORTEST && count < piece * PIECES * threads) piece /= 2;
    return piece;
}

// What is left of one thread's part, alone in its line of the caches.
struct alignas(64) Part {
    std::atomic<std::int64_t> next;
    std::int64_t end;
};

class Pool {
public:
    void run(std::int64_t count, int threads, const std::function<void(std::int64_t, std::int64_t)>& work) {
        std::lock_guard<std::mutex> one(calls_);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            follow();
            threads = 1 + start(threads - 1);
            work_ = &work;
            divide(count, threads);
            wanted_ = threads - 1;
            busy_ = threads - 1;
            ++turn_;
        }
        begin_.notify_all();
        take(threads - 1);
        std::unique_lock<std::mutex> lock(mutex_);
        end_.wait(lock, [this] { return busy_ == 0; });
        work_ = nullptr;
    }

private:
    // Where this thread may run now; on machines of more cores than such a set holds threads stay where they began.
    void follow() {
        cpu_set_t where;
        CPU_ZERO(&where);
        if (sched_getaffinity(0, sizeof where, &where) != 0 || CPU_EQUAL(&where, &where_)) return;
        where_ = where;
        ++moves_;
    }

    // There are so many threads now, or as many as could be had.
    int start(int wanted) {
        for (int index = count_of_threads_; index < wanted; ++index) {
            try {
                std::thread([this, index] { serve(index); }).detach();
            } catch (const std::system_error&) {
                return index;
            }
            ++count_of_threads_;
        }
        return wanted;
    }

    // Each thread has a part of its own, so that all of memory is worked on at once, wherever its pages are.
    void divide(std::int64_t count, int threads) {
        if (static_cast<int>(parts_.size()) < threads) parts_ = std::vector<Part>(threads);
        piece_ = piece_of(count, threads);
        const std::int64_t pieces = (count + piece_ - 1) / piece_;
        for (int i = 0; i < threads; ++i) {
            const std::int64_t end = pieces * (i + 1) / threads * piece_;
            parts_[i].next.store(pieces * i / threads * piece_);
            parts_[i].end = end < count ? end : count;
        }
        shared_ = threads;
    }

    // A thread's own part first, then what others have left of theirs.
    void take(int own) {
        for (int i = 0; i < shared_; ++i) {
            Part& part = parts_[(own + i) % shared_];
            for (;;) {
                const std::int64_t at = part.next.fetch_add(piece_);
                if (at >= part.end) break;
                (*work_)(at, at + piece_ < part.end ? at + piece_ : part.end);
            }
        }
    }

    void serve(int index) {
        pthread_setname_np(pthread_self(), "overspill-pool");
        std::uint64_t seen = 0, moves = 0;
        for (;;) {
            bool moved;
            cpu_set_t where;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                begin_.wait(lock, [&] { return turn_ != seen; });
                seen = turn_;
                if (index >= wanted_) continue;
                moved = moves != moves_;
                moves = moves_;
                where = where_;
            }
            if (moved) sched_setaffinity(0, sizeof where, &where);
            take(index);
            std::lock_guard<std::mutex> lock(mutex_);
            if (--busy_ == 0) end_.notify_one();
        }
    }

    std::mutex calls_, mutex_;
    std::condition_variable begin_, end_;
    const std::function<void(std::int64_t, std::int64_t)>* work_ = nullptr;
    std::vector<Part> parts_;
    int shared_ = 0;
    std::int64_t piece_ = SHORTEST;
    std::uint64_t turn_ = 0, moves_ = 0;
    cpu_set_t where_{};
    int wanted_ = 0, busy_ = 0, count_of_threads_ = 0;
};

// Never destroyed, because its threads outlive everything; a forked process has none of them, so it gets another one.
// Nothing here is locked: what another thread has locked while this one forks stays locked in the new process.
std::atomic<Pool*> found{nullptr};
const int at_fork = pthread_atfork(nullptr, nullptr, [] { found.store(nullptr); });

Pool& pool() {
    Pool* there = found.load();
    if (there == nullptr) {
        Pool* fresh = new Pool;
        if (found.compare_exchange_strong(there, fresh)) return *fresh;
        delete fresh;
    }
    return *there;
}

}  // namespace

void share(std::int64_t count, int threads, const std::function<void(std::int64_t, std::int64_t)>& work) {
    const std::int64_t pieces = (count + SHORTEST - 1) / SHORTEST;
    if (threads > pieces) threads = static_cast<int>(pieces);
    if (threads <= 1) {
        if (count > 0) work(0, count);
        return;
    }
    pool().run(count, threads, work);
}

}  // namespace overspill

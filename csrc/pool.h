// Threads of its own, whatever OMP_NUM_THREADS says.
#pragma once

#include <cstdint>
#include <functional>

namespace overspill {

// Calls `work(begin, end)` for pieces of [0, count) on `threads` threads, this one among them, and waits for all.
// Each has a part of its own; whoever is ready takes pieces of others', so that a core that others use too delays nobody.
// They run on the cores that the calling thread may run on, wherever they ran before.
void share(std::int64_t count, int threads, const std::function<void(std::int64_t, std::int64_t)>& work);

}  // namespace overspill

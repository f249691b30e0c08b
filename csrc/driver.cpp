// Several calls of CUDA's driver in one go: what overspill/tiers/driver.py calls. The functions are handed in, so nothing
// of CUDA is needed to build this.
#include <cstddef>
#include <cstdint>

extern "C" {

struct overspill_driver {
    int (*wait)(void* stream, void* event, unsigned flags);
    int (*copy)(void* to, const void* from, std::size_t bytes, void* stream);
    int (*record)(void* event, void* stream);
};

struct overspill_call {
    std::uint64_t kind;  // 0: wait for an event, 1: copy, 2: record an event
    void* what;          // the event, or where the copy goes
    const void* from;
    std::uint64_t bytes;
};

// On one stream, one after the other; the first error, if there is one.
__attribute__((visibility("default"))) int overspill_play(const overspill_driver* driver, const overspill_call* calls,
                                                          std::int64_t count, void* stream) {
    for (std::int64_t i = 0; i < count; ++i) {
        const overspill_call& call = calls[i];
        const int code = call.kind == 0   ? driver->wait(stream, call.what, 0)
                         : call.kind == 1 ? driver->copy(call.what, call.from, call.bytes, stream)
                                          : driver->record(call.what, stream);
        if (code) return code;
    }
    return 0;
}
}

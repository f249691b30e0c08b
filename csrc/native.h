// The interface: what overspill/kernels/cpu.py calls. Plain C, so that ctypes can.
#pragma once

#include <cstdint>

extern "C" {

// Flat arrays of one length. Masters are the weights themselves (fp32), or bf16 weights and what is kept beside them.
// Formats are those of overspill/kernels/codecs.py.
struct overspill_elements {
    void* weight;
    void* kept;  // null: weights are fp32, and their own masters; else int16, or int8 where states are compact
    const void* gradient;
    void* fields[3];        // as many as the rule keeps: fp32, bf16 or 8 bits
    std::uint8_t* tops[3];  // compact: the exponents of their blocks
    std::int64_t count;
    std::int64_t first;     // where the first element is in its parameter
    std::uint32_t key;      // for chance: of the parameter and the step
    std::int32_t format;    // 0: exact, 1: bf16, 2: compact
    std::int32_t narrow_kept;
    std::int32_t narrow_gradient;  // bf16, not fp32
    std::int32_t factors;          // how many of the following count
    float factor[2];               // what the gradient is multiplied with, one after the other
    std::int32_t maximize;
};

struct overspill_adam {
    float shrink, decay, lerp, less, beta2, rest2, size, root, eps;
    std::int32_t decay_kind;  // 0: none, 1: of the weights, 2: added to the gradient
    std::int32_t near;        // which end the moving average starts from
    std::int32_t amsgrad;
};

struct overspill_sgd {
    float decay, momentum, fresh, less_lr;
    std::int32_t decays, has_momentum, begin, nesterov;
};

struct overspill_adagrad {
    float decay, less_lr, eps;
    std::int32_t decays;
};
}

namespace overspill {

// One instruction set: each function updates the elements from `begin` to `end`.
struct Kernels {
    void (*adam)(const overspill_elements&, const overspill_adam&, std::int64_t begin, std::int64_t end);
    void (*sgd)(const overspill_elements&, const overspill_sgd&, std::int64_t begin, std::int64_t end);
    void (*adagrad)(const overspill_elements&, const overspill_adagrad&, std::int64_t begin, std::int64_t end);
};

extern const Kernels portable;
extern const Kernels avx2;
extern const Kernels avx512;

}  // namespace overspill

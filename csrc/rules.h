// The arithmetic of every update rule: one text for the CPU kernels (cpu_update.cpp, where F is float) and for the CUDA
// kernels (cuda/update_body.cuh, where F is a float whose operators round to nearest and are never contracted).
//
// A rule is a struct of the scalars of an update, floats that the caller has computed in double and rounded once, and
// what is done with one element: of the master p, of the gradient g (times grad_scale already) and of kStates planes.
// The order written here is the order of the torch lines that define the bits: gemini/rules.py for Adam,
// gemini/optim/elementwise.py for the others, whose scalars have these names and this order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "formats.h"

#if defined(__CUDACC__)
#define GEMINI_RULE __host__ __device__ __forceinline__
#else
#define GEMINI_RULE inline __attribute__((always_inline))
#endif

namespace gemini {

GEMINI_INLINE float root(float x) { return std::sqrt(x); }

// By bits: a branch in an arithmetic loop is where auto-vectorisers give up.
GEMINI_INLINE float select(bool condition, float yes, float no) {
    return float_of(select_bits(condition, bits_of(yes), bits_of(no)));
}

// 0 of zeros and of NaN.
template <class F>
GEMINI_RULE F sign(F x) {
    return F(x > 0.f ? 1.f : 0.f) - F(x < 0.f ? 1.f : 0.f);
}

// Of a rule, kSquares: bit k is set if state k is an average of squares; that decides its compact form (compact.h).
constexpr int kNotCompact = -1;

// AdamW (decoupled weight decay) and Adam with L2.
template <bool Decoupled>
struct Adam {
    static constexpr int kStates = 2;
    static constexpr int kSquares = 2;
    float c1;            // 1 - beta1
    float c2;            // 1 - beta2
    float beta2;
    float decay;         // 1 - lr * weight_decay
    float wd;            // weight_decay
    float neg_step;      // -lr / (1 - beta1^step)
    float inv_sqrt_bc2;  // 1 / sqrt(1 - beta2^step)
    float eps;
    float grad_scale;

    template <class F>
    GEMINI_RULE void update(F& p, F g, F& m, F& v) const {
        if (!Decoupled) g = g + wd * p;
        m = m + (g - m) * c1;
        v = v * beta2 + (c2 * g) * g;
        const F d = root(v) * inv_sqrt_bc2 + eps;
        if (Decoupled) p = p * decay;
        p = p + (neg_step * m) / d;
    }
};

// SGD with momentum: `fresh` is 1 in the first update and 1 - dampening later, the step goes along
// `of_grad` * g + `of_buffer` * b, which is (1, momentum) with Nesterov and (0, 1) without.
struct Sgd {
    static constexpr int kStates = 1;
    static constexpr int kSquares = 0;
    float wd, momentum, fresh, of_grad, of_buffer, neg_lr, grad_scale;

    template <class F>
    GEMINI_RULE void update(F& p, F g, F& b) const {
        g = g + wd * p;
        b = b * momentum + g * fresh;
        p = p + (g * of_grad + b * of_buffer) * neg_lr;
    }
};

// SGD without a state.
struct PlainSgd {
    static constexpr int kStates = 0;
    static constexpr int kSquares = 0;
    float wd, neg_lr, grad_scale;

    template <class F>
    GEMINI_RULE void update(F& p, F g) const {
        g = g + wd * p;
        p = p + g * neg_lr;
    }
};

struct Lion {
    static constexpr int kStates = 1;
    static constexpr int kSquares = 0;
    float beta1, c1, beta2, c2, decay, neg_lr, grad_scale;

    template <class F>
    GEMINI_RULE void update(F& p, F g, F& m) const {
        const F u = m * beta1 + g * c1;
        p = p * decay + sign(u) * neg_lr;
        m = m * beta2 + g * c2;
    }
};

// Not a step: a moving average of the master, which stays as it is. `fresh` is 1 where it begins as the master.
struct Average {
    static constexpr int kStates = 1;
    static constexpr int kSquares = kNotCompact;
    float weight, fresh, grad_scale;

    template <class F>
    GEMINI_RULE void update(F& p, F, F& ema) const {
        ema = select(fresh > 0.f, p, ema - (ema - p) * weight);
    }
};

constexpr int kMaxStates = 4, kMaxScalars = 14;

// The arrays of an update: weights are fp32 with residual == nullptr, or bf16 with int16 residuals; states are fp32.
// Of compact ones weights are bf16 with int8 residuals, states bytes, and each has scales, a byte for 64 elements.
struct Arrays {
    void* weights;
    void* residual;
    const void* grad;
    int num_states;
    void* states[kMaxStates];
    void* scales[kMaxStates];
};

#if !defined(__CUDACC_RTC__)  // the rest is for the host

enum class RuleKind : int {
    adamw, adam, sgd, plain_sgd, lion, average
};

// The scalars of an update of any rule: which one it is, and its numbers in the order of its struct.
struct Scalars {
    RuleKind kind;
    int count;
    float values[kMaxScalars];

    template <class Rule>
    Rule as(int num_states) const {
        static_assert(sizeof(Rule) % sizeof(float) == 0 && sizeof(Rule) <= sizeof(values), "a struct of floats");
        if (count * sizeof(float) != sizeof(Rule)) throw std::invalid_argument("an update with scalars of another rule");
        if (num_states != Rule::kStates) throw std::invalid_argument("an update with states of another rule");
        Rule rule;
        std::memcpy(&rule, values, sizeof rule);
        return rule;
    }
};

inline Scalars make_scalars(const std::string& name, const std::vector<float>& values) {
    const char* const names[] = {"adamw", "adam", "sgd", "plain_sgd", "lion", "average"};
    const auto found = std::find(std::begin(names), std::end(names), name);
    Scalars made{};
    made.kind = static_cast<RuleKind>(found - std::begin(names));
    if (found == std::end(names)) throw std::invalid_argument("no rule is called " + name);
    if (values.size() > kMaxScalars) throw std::invalid_argument("no rule has so many scalars");
    made.count = static_cast<int>(values.size());
    std::copy(values.begin(), values.end(), made.values);
    return made;
}

inline Arrays arrays_at(uintptr_t weights, uintptr_t residual, uintptr_t grad, const std::vector<uintptr_t>& states) {
    const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
    if (states.size() > kMaxStates) throw std::invalid_argument("no rule has so many states");
    Arrays made{at(weights), at(residual), at(grad), static_cast<int>(states.size()), {}, {}};
    std::transform(states.begin(), states.end(), made.states, at);
    return made;
}

inline Arrays compact_arrays_at(uintptr_t weights, uintptr_t residual, uintptr_t grad, const std::vector<uintptr_t>& states,
                                const std::vector<uintptr_t>& scales) {
    if (scales.size() != states.size()) throw std::invalid_argument("compact states have scales each");
    Arrays made = arrays_at(weights, residual, grad, states);
    const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
    std::transform(scales.begin(), scales.end(), made.scales, at);
    return made;
}

// Calls `use` with the rule that the scalars are of.
template <class Use>
void with_rule(const Scalars& scalars, const Arrays& arrays, Use use) {
    const int n = arrays.num_states;
    switch (scalars.kind) {
        case RuleKind::adamw: return use(scalars.as<Adam<true>>(n));
        case RuleKind::adam: return use(scalars.as<Adam<false>>(n));
        case RuleKind::sgd: return use(scalars.as<Sgd>(n));
        case RuleKind::plain_sgd: return use(scalars.as<PlainSgd>(n));
        case RuleKind::lion: return use(scalars.as<Lion>(n));
        case RuleKind::average: return use(scalars.as<Average>(n));
    }
}

#endif

}  // namespace gemini

// What the kernels name of the standard library and of ../isa.h, for NVRTC, which has no headers: gemini/kernels/nvrtc.py
// puts this text before theirs and leaves the lines out that include.
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned;
using int64_t = long;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;

namespace std {

using ::memcpy;
using ::sqrt;

template <bool, class Yes, class>
struct conditional { using type = Yes; };
template <class Yes, class No>
struct conditional<false, Yes, No> { using type = No; };
template <bool Condition, class Yes, class No>
using conditional_t = typename conditional<Condition, Yes, No>::type;

template <size_t...>
struct index_sequence {};
template <size_t N, size_t... I>
struct counted : counted<N - 1, N - 1, I...> {};
template <size_t... I>
struct counted<0, I...> { using type = index_sequence<I...>; };
template <size_t N>
using make_index_sequence = typename counted<N>::type;

}  // namespace std

#define GEMINI_INLINE static inline __device__
#define GEMINI_INDEPENDENT

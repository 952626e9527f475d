// Vectors of numbers, by the extensions of gcc and clang. The loader defines REAL, float or double.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace {

constexpr REAL INFINITE = std::numeric_limits<REAL>::infinity();
constexpr int64_t LANES = 32 / sizeof(REAL);

typedef REAL Vector __attribute__((vector_size(32), may_alias));

// A vector at any address.
typedef REAL Loose __attribute__((vector_size(32), aligned(sizeof(REAL)), may_alias));

// Fewer numbers are not worth more threads; torch's own limit.
constexpr int64_t LEAST_FOR_THREADS = 32768;

// Do some work for each of `count` items, by threads if `is_much`. A forked process would wait for
// the threads of its parent, so small work must not enter a parallel region.
template <typename Work>
inline void for_each(int64_t count, bool is_much, const Work& work) {
    if (!is_much) {
        for (int64_t item = 0; item < count; item++) work(item);
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t item = 0; item < count; item++) work(item);
}

inline Vector lanes_at(const REAL* from) { return *reinterpret_cast<const Loose*>(from); }

// Return a vector of `count` numbers, padded with zeros.
inline Vector first_of(const REAL* from, int64_t count) {
    Vector lanes{};
    std::memcpy(&lanes, from, count * sizeof(REAL));
    return lanes;
}

inline REAL sum_of(const Vector& lanes) {
    typedef REAL Half __attribute__((vector_size(16), may_alias));
    const Half* halves = reinterpret_cast<const Half*>(&lanes);
    const Half sums = halves[0] + halves[1];
    REAL sum = sums[0];
    for (int64_t i = 1; i < LANES / 2; i++) sum += sums[i];
    return sum;
}

// NaN is ignored.
inline REAL largest_of(const Vector& lanes) {
    REAL largest = lanes[0];
    for (int64_t i = 1; i < LANES; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}

// Return the exponentials of numbers <= 0, to about one rounding: 2 to a whole power, times a
// series. NaN stays NaN.
inline Vector exponential(const Vector& numbers) {
    constexpr bool is_double = sizeof(REAL) == 8;
    typedef std::conditional_t<is_double, int64_t, int32_t> Integer;
    typedef Integer Integers __attribute__((vector_size(32), may_alias));
    constexpr int64_t fraction_bits = is_double ? 52 : 23;
    constexpr Integer bias = is_double ? 1023 : 127;
    constexpr int64_t terms = is_double ? 13 : 7;
    // Smaller results would be subnormal, and are set to zero.
    const Vector least = Vector{} - REAL(is_double ? 708 : 87);
    const Vector x = numbers < least ? least : numbers;
    // Adding and subtracting this rounds to an integer.
    constexpr REAL much = REAL(3) * (int64_t(1) << (fraction_bits - 1));
    const Vector power = (x * REAL(1.4426950408889634) + much) - much;
    // The logarithm of 2 in two parts; the first times a power is exact.
    const Vector rest = x - power * REAL(0.693145751953125) - power * REAL(1.42860682030941723e-6);
    Vector sum = Vector{} + 1;
    for (int64_t term = terms; term > 0; term--) sum = sum * rest * (REAL(1) / term) + 1;
    const Integers bits = (__builtin_convertvector(power, Integers) + bias) << fraction_bits;
    const Vector found = sum * reinterpret_cast<const Vector&>(bits);
    return numbers < least ? Vector{} : found;
}

}  // namespace

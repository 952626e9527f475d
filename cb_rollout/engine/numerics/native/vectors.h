// Vectors of numbers, by the extensions of gcc and clang. The loader defines STORED, the type of
// numbers in memory: float, double or Bfloat16. They are computed with as REAL.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#ifdef __FMA__
#include <immintrin.h>
#endif

namespace {

#define INLINED __attribute__((always_inline))

// The upper half of a float.
struct Bfloat16 {
    uint16_t bits;
};

typedef std::conditional_t<std::is_same_v<STORED, Bfloat16>, float, STORED> REAL;

constexpr REAL INFINITE = std::numeric_limits<REAL>::infinity();

// Bytes of a register. AVX-512 also has twice as many registers as AVX2.
#ifdef __AVX512F__
#define VECTOR_BYTES 64
#else
#define VECTOR_BYTES 32
#endif
constexpr int64_t LANES = VECTOR_BYTES / sizeof(REAL);

typedef REAL Vector __attribute__((vector_size(VECTOR_BYTES), may_alias));

// A vector at any address.
typedef REAL Loose __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

// Fewer numbers are not worth more threads; torch's own limit.
constexpr int64_t LEAST_FOR_THREADS = 32768;

// Do some work for each of `count` items, by threads if `is_much`. They take items in portions that
// shrink, so that a thread that lost its core holds the others up less. A forked process would wait
// for the threads of its parent, so small work must not enter a parallel region.
template <typename Work>
inline void for_each(int64_t count, bool is_much, const Work& work) {
    if (!is_much) {
        for (int64_t item = 0; item < count; item++) work(item);
        return;
    }
#pragma omp parallel for schedule(guided)
    for (int64_t item = 0; item < count; item++) work(item);
}

// Return a * b + c, rounded once where the CPU can. The compiler would choose for each loop anew
// whether to join the two, and results would depend on the loop.
inline INLINED Vector fused(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
    if constexpr (sizeof(REAL) == 4)
        return Vector(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
    else
        return Vector(_mm512_fmadd_pd(__m512d(a), __m512d(b), __m512d(c)));
#elif defined(__FMA__)
    if constexpr (sizeof(REAL) == 4)
        return Vector(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
    else
        return Vector(_mm256_fmadd_pd(__m256d(a), __m256d(b), __m256d(c)));
#else
    return a * b + c;
#endif
}

// Call `work` with each index below COUNT, known when compiled: arrays that are indexed so live in
// registers. A loop leaves them in memory.
template <int64_t COUNT, typename Work>
inline INLINED void unrolled(const Work& work) {
    [&]<int64_t... INDEX>(std::integer_sequence<int64_t, INDEX...>) INLINED {
        (work(std::integral_constant<int64_t, INDEX>{}), ...);
    }(std::make_integer_sequence<int64_t, COUNT>{});
}

template <int64_t... LANE>
inline INLINED Vector filled(REAL number, std::integer_sequence<int64_t, LANE...>) {
    return Vector{(void(LANE), number)...};
}

// Return a number in every lane. Adding it to zeros would take a slot of the multiplications.
inline INLINED Vector filled(REAL number) {
    return filled(number, std::make_integer_sequence<int64_t, LANES>{});
}

inline Vector lanes_at(const REAL* from) { return *reinterpret_cast<const Loose*>(from); }

// Numbers in memory come in blocks, each of which fills PARTS vectors. A block of Bfloat16 fills
// two, one with the numbers of even index and one with the others: so nothing is shuffled.
constexpr int64_t BLOCK = VECTOR_BYTES / sizeof(STORED);
constexpr int64_t PARTS = BLOCK / LANES;

constexpr int64_t blocks_of(int64_t count) { return (count + BLOCK - 1) / BLOCK; }

typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES), may_alias));
constexpr uint32_t UPPER_HALF = 0xffff0000;

inline Vector part_at(const REAL* from, int64_t) { return lanes_at(from); }

inline Vector part_at(const Bfloat16* from, int64_t part) {
    Words words;
    std::memcpy(&words, from, sizeof(words));
    words = part ? words & UPPER_HALF : words << 16;
    return reinterpret_cast<const Vector&>(words);
}

// Return a part of a block; with fewer than BLOCK numbers left, it is padded with zeros.
inline INLINED Vector part_at(const STORED* from, int64_t part, int64_t left) {
    if (left >= BLOCK) return part_at(from, part);
    STORED numbers[BLOCK] = {};
    std::memcpy(numbers, from, left * sizeof(STORED));
    return part_at(numbers, part);
}

// What a product takes of a block: with AVX512_BF16 all its numbers at once, else part by part.
#ifdef __AVX512BF16__
constexpr bool MULTIPLIES_STORED = std::is_same_v<STORED, Bfloat16>;
#else
constexpr bool MULTIPLIES_STORED = false;
#endif
constexpr int64_t OPERANDS = MULTIPLIES_STORED ? 1 : PARTS;

typedef std::conditional_t<MULTIPLIES_STORED, Words, Vector> Operand;

// Return an operand of a block; with fewer than BLOCK numbers left, it is padded with zeros.
inline INLINED Operand operand_at(const STORED* from, int64_t part, int64_t left) {
    if constexpr (!MULTIPLIES_STORED) return Operand(part_at(from, part, left));
    Operand operand = {};
    std::memcpy(&operand, from, left < BLOCK ? left * sizeof(STORED) : sizeof(operand));
    return operand;
}

#ifdef __AVX512BF16__
// Add the products of two neighbouring numbers to each lane.
inline INLINED Vector fused(Words a, Words b, Vector c) {
    return Vector(_mm512_dpbf16_ps(__m512(c), __m512bh(a), __m512bh(b)));
}
#endif

inline REAL real(REAL number) { return number; }

inline float real(Bfloat16 number) {
    const uint32_t bits = uint32_t(number.bits) << 16;
    float found;
    std::memcpy(&found, &bits, sizeof(found));
    return found;
}

inline void store(REAL number, REAL* to) { *to = number; }

// Round to the nearest, ties to even; NaN stays NaN.
inline void store(float number, Bfloat16* to) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to->bits = number == number ? rounded : 0x7fc0;
}

// Join the lanes of a vector: its halves, until 16 bytes are left, and then one after the other.
template <int64_t BYTES = VECTOR_BYTES, typename Join>
inline INLINED REAL joined(const void* lanes, const Join& join) {
    if constexpr (BYTES == 16) {
        const REAL* numbers = static_cast<const REAL*>(lanes);
        REAL found = numbers[0];
        for (int64_t i = 1; i < int64_t(16 / sizeof(REAL)); i++) found = join(found, numbers[i]);
        return found;
    } else {
        typedef REAL Half __attribute__((vector_size(BYTES / 2), may_alias));
        const Half* halves = static_cast<const Half*>(lanes);
        const Half half = join(halves[0], halves[1]);
        return joined<BYTES / 2>(&half, join);
    }
}

inline REAL sum_of(const Vector& lanes) {
    return joined(&lanes, [](auto a, auto b) INLINED { return a + b; });
}

// The lanes are no NaN.
inline REAL largest_of(const Vector& lanes) {
    return joined(&lanes, [](auto a, auto b) INLINED { return a > b ? a : b; });
}

// Return lanes of two vectors, STEP of the first and STEP of the second in turns: of each 2 * STEP
// lanes the first half, or the other.
template <int64_t STEP, bool IS_OTHER, int64_t... LANE>
inline INLINED Vector halves_of(Vector a, Vector b, std::integer_sequence<int64_t, LANE...>) {
    constexpr auto index = [](int64_t lane) {
        const int64_t group = lane / (2 * STEP) * (2 * STEP), rest = lane % (2 * STEP);
        return group + IS_OTHER * STEP + (rest < STEP ? rest : LANES + rest - STEP);
    };
#ifdef __clang__
    return __builtin_shufflevector(a, b, index(LANE)...);
#else
    typedef std::conditional_t<sizeof(REAL) == 8, int64_t, int32_t> Integer;
    typedef Integer Integers __attribute__((vector_size(VECTOR_BYTES)));
    return __builtin_shuffle(a, b, Integers{Integer(index(LANE))...});
#endif
}

// Transpose LANES vectors: lane j of vector i becomes lane i of vector j.
template <int64_t STEP = 1>
inline INLINED void transpose(Vector (&vectors)[LANES]) {
    constexpr std::make_integer_sequence<int64_t, LANES> lanes;
    unrolled<LANES>([&](auto i) INLINED {
        if constexpr ((i & STEP) == 0) {
            const Vector a = vectors[i], b = vectors[i + STEP];
            vectors[i] = halves_of<STEP, false>(a, b, lanes);
            vectors[i + STEP] = halves_of<STEP, true>(a, b, lanes);
        }
    });
    if constexpr (2 * STEP < LANES) transpose<2 * STEP>(vectors);
}

// As Vector where REAL is float.
typedef float Floats __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef uint16_t HalfWords __attribute__((vector_size(VECTOR_BYTES / 2), may_alias));

// Round to Bfloat16, to the nearest, ties to even; NaN stays NaN.
inline INLINED HalfWords rounded(const Floats& numbers) {
    const Words& bits = reinterpret_cast<const Words&>(numbers);
    const Words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words found = numbers == numbers ? nearest : Words{} + 0x7fc0;
    return __builtin_convertvector(found, HalfWords);
}

// Return the numbers at an address, in order.
inline INLINED Vector numbers_at(const REAL* from) { return lanes_at(from); }

inline INLINED Vector numbers_at(const Bfloat16* from) {
    HalfWords halves;
    std::memcpy(&halves, from, sizeof(halves));
    const Words words = __builtin_convertvector(halves, Words) << 16;
    return reinterpret_cast<const Vector&>(words);
}

// Write the first `count` lanes.
inline INLINED void store_lanes(const Vector& numbers, int64_t count, REAL* to) {
    if (count >= LANES) std::memcpy(to, &numbers, sizeof(numbers));
    else std::memcpy(to, &numbers, count * sizeof(REAL));
}

inline INLINED void store_lanes(const Vector& numbers, int64_t count, Bfloat16* to) {
    const HalfWords halves = rounded(reinterpret_cast<const Floats&>(numbers));
    if (count >= LANES) std::memcpy(to, &halves, sizeof(halves));
    else std::memcpy(to, &halves, count * sizeof(Bfloat16));
}

// Add neighbouring STEPs of lanes of each of two vectors.
template <int64_t STEP>
inline INLINED Vector added_neighbours(Vector a, Vector b) {
    constexpr std::make_integer_sequence<int64_t, LANES> lanes;
    return halves_of<STEP, false>(a, b, lanes) + halves_of<STEP, true>(a, b, lanes);
}

// Write the sums of the lanes of four vectors.
inline INLINED void sums_of(const Vector (&four)[4], REAL* sums) {
    const Vector lanes = added_neighbours<2>(
        added_neighbours<1>(four[0], four[1]), added_neighbours<1>(four[2], four[3]));
    typedef REAL Four __attribute__((vector_size(4 * sizeof(REAL)), may_alias));
    Four parts[LANES / 4];
    std::memcpy(parts, &lanes, sizeof(lanes));
    for (int64_t count = LANES / 8; count > 0; count /= 2)
        for (int64_t i = 0; i < count; i++) parts[i] += parts[count + i];
    std::memcpy(sums, parts, sizeof(Four));
}

// Return the exponentials of numbers <= 0, to about one rounding: 2 to a whole power, times a
// series. NaN stays NaN.
inline Vector exponential(const Vector& numbers) {
    constexpr bool is_double = sizeof(REAL) == 8;
    typedef std::conditional_t<is_double, int64_t, int32_t> Integer;
    typedef Integer Integers __attribute__((vector_size(VECTOR_BYTES), may_alias));
    constexpr int64_t fraction_bits = is_double ? 52 : 23;
    constexpr Integer bias = is_double ? 1023 : 127;
    constexpr int64_t terms = is_double ? 13 : 7;
    // Smaller results would be subnormal, and are set to zero.
    const Vector least = Vector{} - REAL(is_double ? 708 : 87);
    const Vector x = numbers < least ? least : numbers;
    // Adding and subtracting this rounds to an integer.
    constexpr REAL much = REAL(3) * (int64_t(1) << (fraction_bits - 1));
    const Vector zero = {};
    const Vector power = fused(x, zero + REAL(1.4426950408889634), zero + much) - much;
    // The logarithm of 2 in two parts; the first times a power is exact.
    const Vector most_of_it = fused(power, zero - REAL(0.693145751953125), x);
    const Vector rest = fused(power, zero - REAL(1.42860682030941723e-6), most_of_it);
    Vector sum = Vector{} + 1;
    for (int64_t term = terms; term > 0; term--) sum = fused(sum * rest, zero + REAL(1) / term, zero + 1);
    const Integers bits = (__builtin_convertvector(power, Integers) + bias) << fraction_bits;
    const Vector found = sum * reinterpret_cast<const Vector&>(bits);
    return numbers < least ? Vector{} : found;
}

// Return the largest of some scores and of `largest`. Scores are padded to whole vectors.
inline REAL largest_of(const REAL* scores, int64_t count, REAL largest) {
    Vector most = Vector{} + largest;
    for (int64_t t = 0; t < count; t += LANES) {
        const Vector some = lanes_at(scores + t);
        most = some > most ? some : most;
    }
    return largest_of(most);
}

// Replace scores by their exponentials; return the sum.
inline REAL exponentials(REAL* scores, int64_t count, REAL most) {
    Vector total = {};
    for (int64_t t = 0; t < count; t += LANES) {
        const Vector weights = exponential(lanes_at(scores + t) - most);
        std::memcpy(scores + t, &weights, sizeof(weights));
        total += weights;
    }
    return sum_of(total);
}

// Write the parts of some numbers, the last block padded with zeros.
inline void widen(const STORED* from, int64_t count, REAL* to) {
    for (int64_t i = 0; i < count; i += BLOCK)
        for (int64_t part = 0; part < PARTS; part++, to += LANES) {
            const Vector some = part_at(from + i, part, count - i);
            std::memcpy(to, &some, sizeof(some));
        }
}

}  // namespace

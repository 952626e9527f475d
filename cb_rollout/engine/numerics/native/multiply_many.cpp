// Products of many rows with the weights of linear layers, which are read as they lie in memory.
//
// A vector holds the same input of several rows, and is multiplied by one number of a weight. So
// weights are read in their own order, and the next block's are prefetched meanwhile. The rows are
// transposed first, and the sums at the end. In bfloat16 with AMX, tiles take the place of vectors.
//
// Each output is one sum over the inputs, in one order for any number of rows.
//
// Follows vectors.h. With ROUNDS_WEIGHTS, weights are float, and rounded to STORED when read.

#include <omp.h>

#include <algorithm>
#include <optional>
#include <vector>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#ifdef ROUNDS_WEIGHTS
typedef float WEIGHT;
#else
typedef STORED WEIGHT;
#endif

// A number as it is multiplied, and the numbers of one step: with AVX512_BF16 two, else one.
typedef std::conditional_t<MULTIPLIES_STORED, STORED, REAL> Number;
typedef std::conditional_t<MULTIPLIES_STORED, uint32_t, REAL> Numbers;
constexpr int64_t PAIRED = sizeof(Numbers) / sizeof(Number);

// Vectors of sums that fill most registers (AVX-512 has 32, AVX2 16), and the outputs of a block.
// With V vectors of rows, SUMS / V outputs are computed at a time.
#ifdef __AVX512F__
constexpr int64_t SUMS = 24;
#else
constexpr int64_t SUMS = 12;
#endif
constexpr int64_t MOST_VECTORS = 3;

// Steps that are unrolled. More do not fit into the cache of decoded instructions.
constexpr int64_t UNROLLED = 8;

// Outputs, rows or steps of a tile of AMX, which has 16 rows of 16 numbers of 32 bits.
constexpr int64_t TILE = 16;

// Outputs of a block of tiles. A block of vectors has fewer.
constexpr int64_t MOST_OUTPUTS = 2 * TILE;

// Bytes that a prefetch loads, and the steps whose weights they hold.
constexpr int64_t LINE = 64;
constexpr int64_t STEPS_OF_A_LINE = LINE / (PAIRED * sizeof(WEIGHT));
static_assert(STEPS_OF_A_LINE % UNROLLED == 0 && UNROLLED <= TILE);

struct Products {
    const STORED* rows;
    STORED* outputs;
    // Weights with the same inputs, and a bias of each or null. Outputs of a row follow each other.
    const WEIGHT* const* weights;
    const STORED* const* biases;
    const int64_t* sizes;
    int64_t num_weights, num_rows, num_inputs;
    // 0: vectors multiply even where the CPU has tiles.
    int64_t allows_tiles;
};

// Vectors of rows that are multiplied together: `count` of them, from vector `first` on.
struct Group {
    int64_t first, count;
};

// Inputs of all rows, transposed: for each group, step by step, a vector after the other.
struct Transposed {
    std::vector<Group> groups;
    std::vector<Vector> vectors;
    int64_t num_steps;
    bool is_tiled;

    const Numbers* of(const Group& group) const {
        return reinterpret_cast<const Numbers*>(vectors.data() + group.first * num_steps);
    }
};

// Outputs of one weight that are computed at a time.
struct OutputBlock {
    const Number* weight;
    // Numbers between the weights of two outputs.
    int64_t stride;
    // Address of the next block's weights, maybe past the last one, and bytes between two outputs.
    uintptr_t next, next_stride;
};

#ifdef HAS_TILES
// Return whether Linux lets this process use tiles.
bool has_tiles() {
    constexpr int64_t ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool is_permitted =
        MULTIPLIES_STORED && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return is_permitted;
}
#else
constexpr bool has_tiles() { return false; }
#endif

// Copy up to LANES numbers of a weight as they are multiplied.
inline void copy_some(const WEIGHT* from, int64_t count, Number* to) {
    Vector numbers = numbers_at(from);
#ifdef ROUNDS_WEIGHTS
    const HalfWords nearest = rounded(reinterpret_cast<const Floats&>(numbers));
    numbers = numbers_at(reinterpret_cast<const STORED*>(&nearest));
#endif
    store_lanes(numbers, count, to);
}

inline void copy_numbers(const WEIGHT* from, int64_t count, Number* to) {
    const int64_t rest = count % LANES;
    for (int64_t i = 0; i < count - rest; i += LANES) copy_some(from + i, LANES, to + i);
    WEIGHT last[LANES] = {};
    std::memcpy(last, from + count - rest, rest * sizeof(WEIGHT));
    copy_some(last, rest, to + count - rest);
}

// Prefetch the next block's weights at the place where this block's are read: LINES from `step` on,
// for outputs from `first` on.
template <int64_t OUTPUTS, int64_t LINES>
inline INLINED void fetch(const OutputBlock& block, int64_t first, int64_t step) {
    const uintptr_t from = block.next + first * block.next_stride + step * PAIRED * sizeof(WEIGHT);
    unrolled<OUTPUTS>([&](auto o) INLINED {
        unrolled<LINES>([&](auto i) INLINED {
            const uintptr_t line = from + o * block.next_stride + i * LINE;
            __builtin_prefetch(reinterpret_cast<const void*>(line), 0, 2);
        });
    });
}

inline INLINED Vector times(REAL weight, Vector rows, Vector sum) {
    return fused(filled(weight), rows, sum);
}

#ifdef __AVX512BF16__
inline INLINED Vector times(uint32_t weights, Words rows, Vector sum) {
    return fused(Words{} + weights, rows, sum);
}
#endif

// Write the sums of some of a block's outputs, from `first` on, for VECTORS of rows: for each output,
// a vector after the other. A function of its own, so that the compiler keeps all sums in registers.
template <int64_t VECTORS, int64_t OUTPUTS>
__attribute__((noinline)) void sum_outputs(
    const OutputBlock& block, int64_t first, const Numbers* rows, int64_t num_steps, int64_t group,
    int64_t num_groups, REAL* sums) {
    // An address takes a register. Three outputs share one, at most two strides away.
    constexpr int64_t SHARING = 3, NUM_ADDRESSES = (OUTPUTS + SHARING - 1) / SHARING;
    typedef std::conditional_t<MULTIPLIES_STORED, Words, Vector> Rows;
    const int64_t stride = block.stride;
    Vector found[OUTPUTS][VECTORS] = {};
    const Number* weights[NUM_ADDRESSES];
    unrolled<NUM_ADDRESSES>([&](auto i) INLINED {
        weights[i] = block.weight + (first + SHARING * i) * stride;
    });
    const auto add = [&](auto step) INLINED {
        Rows vectors[VECTORS];
        unrolled<VECTORS>([&](auto v) INLINED {
            std::memcpy(&vectors[v], rows + (step * VECTORS + v) * LANES, sizeof(Rows));
        });
        unrolled<OUTPUTS>([&](auto o) INLINED {
            Numbers weight;
            std::memcpy(
                &weight, weights[o / SHARING] + o % SHARING * stride + step * PAIRED,
                sizeof(weight));
            unrolled<VECTORS>([&](auto v) INLINED {
                found[o][v] = times(weight, vectors[v], found[o][v]);
            });
        });
    };
    const auto advance = [&](int64_t steps) INLINED {
        unrolled<NUM_ADDRESSES>([&](auto i) INLINED {
            weights[i] += steps * PAIRED;
            // Keep an address, which the compiler would compute anew for each output.
            asm("" : "+r"(weights[i]));
        });
        rows += steps * VECTORS * LANES;
    };
    // Each group of rows fetches its share of the lines.
    constexpr int64_t RUNS_OF_A_LINE = STEPS_OF_A_LINE / UNROLLED;
    int64_t until_fetched = group * RUNS_OF_A_LINE;
    int64_t step = 0;
    for (; step + UNROLLED <= num_steps; step += UNROLLED) {
        if (until_fetched == 0) {
            fetch<OUTPUTS, 1>(block, first, step);
            until_fetched = num_groups * RUNS_OF_A_LINE;
        }
        until_fetched--;
        unrolled<UNROLLED>(add);
        advance(UNROLLED);
    }
    for (; step < num_steps; step++) {
        add(std::integral_constant<int64_t, 0>{});
        advance(1);
    }
    unrolled<OUTPUTS>([&](auto o) INLINED {
        unrolled<VECTORS>([&](auto v) INLINED {
            std::memcpy(sums + (o * VECTORS + v) * LANES, &found[o][v], sizeof(Vector));
        });
    });
}

// Write the sums of a block's outputs for VECTORS of rows.
template <int64_t VECTORS>
void sum_vectors(
    const OutputBlock& block, const Numbers* rows, int64_t num_steps, int64_t group,
    int64_t num_groups, REAL* sums) {
    constexpr int64_t OUTPUTS = SUMS / VECTORS;
    for (int64_t first = 0; first < SUMS; first += OUTPUTS) {
        sum_outputs<VECTORS, OUTPUTS>(block, first, rows, num_steps, group, num_groups, sums);
        sums += OUTPUTS * VECTORS * LANES;
    }
}

#ifdef HAS_TILES
// The shapes of a thread's eight tiles.
struct alignas(64) Shapes {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(Shapes) == 64);

constexpr Shapes SHAPES = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16},
};

// Shapes this thread's tiles, and restores another library's shapes at the end; the numbers in its
// tiles are lost. The compiler's own functions do not say which memory they read and write.
struct ShapedTiles {
    Shapes before;

    ShapedTiles() {
        asm volatile("sttilecfg %0" : "=m"(before));
        asm volatile("ldtilecfg %0" : : "m"(SHAPES));
    }
    ~ShapedTiles() { asm volatile("ldtilecfg %0" : : "m"(before)); }
};

// As `sum_vectors`, for one or two vectors and MOST_OUTPUTS.
template <int64_t VECTORS>
void sum_tiles(
    const OutputBlock& block, const Numbers* rows, int64_t num_steps, int64_t group,
    int64_t num_groups, REAL* sums) {
    // The compiler does not know what `_tile_loadd` reads.
    asm volatile("" ::: "memory");
    const int64_t weight_stride = block.stride * sizeof(Number);
    constexpr int64_t stride = VECTORS * LANES * sizeof(Numbers);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < num_steps; step += TILE) {
        if (step / TILE % num_groups == group)
            fetch<MOST_OUTPUTS, TILE / STEPS_OF_A_LINE>(block, 0, step);
        const Number* weight = block.weight + step * PAIRED;
        const Numbers* inputs = rows + step * VECTORS * LANES;
        _tile_loadd(4, weight, weight_stride);
        _tile_loadd(5, weight + TILE * block.stride, weight_stride);
        _tile_loadd(6, inputs, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (VECTORS == 2) {
            _tile_loadd(7, inputs + LANES, stride);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, stride);
    _tile_stored(2, sums + TILE * VECTORS * LANES, stride);
    if constexpr (VECTORS == 2) {
        _tile_stored(1, sums + LANES, stride);
        _tile_stored(3, sums + (TILE * VECTORS + 1) * LANES, stride);
    }
}
#endif

void sum_block(
    const OutputBlock& block, const Transposed& rows, int64_t group, REAL* sums) {
    const int64_t num_groups = rows.groups.size();
    const Numbers* numbers = rows.of(rows.groups[group]);
    unrolled<MOST_VECTORS>([&](auto index) {
        constexpr int64_t VECTORS = index + 1;
        if (rows.groups[group].count != VECTORS) return;
#ifdef HAS_TILES
        if constexpr (MULTIPLIES_STORED && VECTORS <= 2)
            if (rows.is_tiled)
                return sum_tiles<VECTORS>(block, numbers, rows.num_steps, group, num_groups, sums);
#endif
        sum_vectors<VECTORS>(block, numbers, rows.num_steps, group, num_groups, sums);
    });
}

// Return a vector of Numbers: a row's inputs from `start` on, padded with zeros.
inline Vector numbers_of(const STORED* row, int64_t start, int64_t num_inputs) {
    constexpr int64_t COUNT = LANES * PAIRED;
    const int64_t count = std::min(COUNT, num_inputs - start);
    STORED padded[COUNT] = {};
    const STORED* from = row + start;
    if (count < COUNT) {
        if (count > 0) std::memcpy(padded, from, count * sizeof(STORED));
        from = padded;
    }
    if constexpr (MULTIPLIES_STORED) {
        Vector pairs;
        std::memcpy(&pairs, from, sizeof(pairs));
        return pairs;
    } else {
        return numbers_at(from);
    }
}

// Transpose rows; the last vector and the last steps are padded with zeros.
Transposed transposed(const Products& products, bool is_much) {
    const int64_t num_inputs = products.num_inputs, num_rows = products.num_rows;
    const int64_t num_vectors = (num_rows + LANES - 1) / LANES;
    Transposed rows;
    rows.is_tiled = products.allows_tiles && has_tiles();
    rows.num_steps = (num_inputs + PAIRED - 1) / PAIRED;
    if (rows.is_tiled) rows.num_steps = (rows.num_steps + TILE - 1) / TILE * TILE;
    // Groups of nearly equal size, because a group of one vector reads as many weights as a full one.
    const int64_t most = rows.is_tiled ? 2 : MOST_VECTORS;
    const int64_t num_groups = (num_vectors + most - 1) / most;
    for (int64_t group = 0; group < num_groups; group++) {
        const int64_t first = num_vectors * group / num_groups;
        rows.groups.push_back({first, num_vectors * (group + 1) / num_groups - first});
    }
    rows.vectors.resize(num_vectors * rows.num_steps);
    for_each(num_vectors, is_much, [&](int64_t vector) {
        int64_t index = num_groups - 1;
        while (rows.groups[index].first > vector) index--;
        const Group& group = rows.groups[index];
        Vector* to = rows.vectors.data() + group.first * rows.num_steps + vector - group.first;
        // A square of numbers at a time.
        for (int64_t start = 0; start < rows.num_steps; start += LANES) {
            Vector square[LANES];
            for (int64_t lane = 0; lane < LANES; lane++) {
                const int64_t row = vector * LANES + lane;
                square[lane] = Vector{};
                if (row < num_rows)
                    square[lane] = numbers_of(
                        products.rows + row * num_inputs, start * PAIRED, num_inputs);
            }
            transpose(square);
            const int64_t end = std::min(start + LANES, rows.num_steps);
            for (int64_t step = start; step < end; step++)
                to[step * group.count] = square[step - start];
        }
    });
    return rows;
}

// Return the block of a weight's outputs from `first` to before `last`. It points into the weight
// where the weight can be multiplied as it is stored. Else (fewer than `count` outputs, inputs that
// need padding, another type) the numbers are copied; `copied` has zeros in place of padding.
OutputBlock block_of(
    const WEIGHT* weight, int64_t num_inputs, int64_t padded_inputs, int64_t first, int64_t last,
    int64_t count, std::vector<Number>& copied) {
    const WEIGHT* from = weight + first * num_inputs;
    const uintptr_t next_stride = num_inputs * sizeof(WEIGHT);
    const uintptr_t next = reinterpret_cast<uintptr_t>(from) + count * next_stride;
    constexpr bool is_stored = std::is_same_v<WEIGHT, STORED> && std::is_same_v<STORED, Number>;
    if (is_stored && last - first == count && padded_inputs == num_inputs)
        return {reinterpret_cast<const Number*>(from), num_inputs, next, next_stride};
    copied.resize(count * padded_inputs);
    for (int64_t output = 0; output < last - first; output++)
        copy_numbers(from + output * num_inputs, num_inputs, copied.data() + output * padded_inputs);
    return {copied.data(), padded_inputs, next, next_stride};
}

// Where a block's outputs go.
struct Target {
    // Of row 0, and from one row to the next.
    STORED* outputs;
    int64_t stride;
    // Of the first output, or null.
    const STORED* bias;
    int64_t num_outputs;
};

// Write a block's outputs for a group of rows, with the bias added.
void write(const REAL* sums, const Group& group, int64_t num_rows, const Target& target) {
    const int64_t width = group.count * LANES;
    for (int64_t start = 0; start < target.num_outputs; start += LANES) {
        const int64_t count = std::min(LANES, target.num_outputs - start);
        Vector bias = {};
        for (int64_t i = 0; target.bias && i < count; i++) bias[i] = real(target.bias[start + i]);
        for (int64_t vector = 0; vector < group.count; vector++) {
            Vector square[LANES];
            for (int64_t i = 0; i < LANES; i++)
                square[i] = lanes_at(sums + (start + i) * width + vector * LANES);
            transpose(square);
            const int64_t first_row = (group.first + vector) * LANES;
            const int64_t last = std::min(LANES, num_rows - first_row);
            for (int64_t i = 0; i < last; i++)
                store_lanes(
                    square[i] + bias, count,
                    target.outputs + (first_row + i) * target.stride + start);
        }
    }
}

}  // namespace

extern "C" void multiply_many(const Products* given) {
    const Products& products = *given;
    int64_t num_outputs = 0;
    for (int64_t i = 0; i < products.num_weights; i++) num_outputs += products.sizes[i];
    const bool is_much =
        products.num_rows * products.num_inputs * num_outputs > LEAST_FOR_THREADS;
    const Transposed rows = transposed(products, is_much);
    const int64_t block_size = rows.is_tiled ? MOST_OUTPUTS : SUMS;
    // The first block of each weight, and its first output.
    std::vector<int64_t> first_blocks, first_outputs;
    int64_t num_blocks = 0, next_output = 0;
    for (int64_t i = 0; i < products.num_weights; i++) {
        first_blocks.push_back(num_blocks);
        first_outputs.push_back(next_output);
        num_blocks += (products.sizes[i] + block_size - 1) / block_size;
        next_output += products.sizes[i];
    }
    std::vector<std::vector<Number>> copies(omp_get_max_threads());
    for_each(num_blocks, is_much, [&](int64_t item) {
#ifdef HAS_TILES
        std::optional<ShapedTiles> shaped;
        if (rows.is_tiled) shaped.emplace();
#endif
        int64_t i = products.num_weights - 1;
        while (first_blocks[i] > item) i--;
        const int64_t first = (item - first_blocks[i]) * block_size;
        const int64_t last = std::min(first + block_size, products.sizes[i]);
        const OutputBlock block = block_of(
            products.weights[i], products.num_inputs, rows.num_steps * PAIRED, first, last,
            block_size, copies[omp_get_thread_num()]);
        const Target target = {
            products.outputs + first_outputs[i] + first,
            num_outputs,
            products.biases ? products.biases[i] + first : nullptr,
            last - first,
        };
        // Padded to whole vectors of outputs.
        alignas(64) REAL sums[MOST_OUTPUTS * MOST_VECTORS * LANES] = {};
        for (int64_t group = 0; group < int64_t(rows.groups.size()); group++) {
            sum_block(block, rows, group, sums);
            write(sums, rows.groups[group], products.num_rows, target);
        }
    });
}

// Products of many rows with the weights of linear layers, which are read as they lie in memory.
//
// A vector holds one input of several rows, and is multiplied by one number of a weight. So a weight
// need not be reordered, and its next rows are fetched from memory while these are multiplied. The
// rows are transposed first. With AMX, a tile of 16 outputs and 16 rows takes a vector's place.
//
// Each output is one sum over the inputs, in one order for any number of rows.
//
// Follows vectors.h. With ROUNDS_WEIGHTS, weights are float, and rounded to STORED when read.

#include <algorithm>
#include <optional>
#include <vector>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
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

// A number as it is multiplied. With AVX512_BF16, numbers are multiplied in pairs.
typedef std::conditional_t<MULTIPLIES_STORED, STORED, REAL> Number;
typedef std::conditional_t<MULTIPLIES_STORED, uint32_t, REAL> Numbers;
constexpr int64_t PAIRED = sizeof(Numbers) / sizeof(Number);

// The vectors of sums that fill most registers: AVX-512 has 32, AVX2 16. So many outputs are
// computed at a time: all of them for one vector of rows, a half for two, a third for three.
#ifdef __AVX512F__
constexpr int64_t SUMS = 24;
#else
constexpr int64_t SUMS = 12;
#endif
constexpr int64_t MOST_VECTORS = 3;

// Steps that are unrolled. More do not fit into the cache of decoded instructions.
constexpr int64_t UNROLLED = 8;

// Outputs of a tile of AMX; its rows; and its steps.
constexpr int64_t TILE = 16;

// Outputs of a block of tiles. A block of vectors has fewer.
constexpr int64_t MOST_OUTPUTS = 2 * TILE;

struct Arguments {
    const STORED* rows;
    STORED* outputs;
    // Weights with the same inputs, and a bias of each or null. Outputs of a row follow each other.
    const WEIGHT* const* weights;
    const STORED* const* biases;
    const int64_t* sizes;
    int64_t num_weights, num_rows, num_inputs;
};

// Rows that are multiplied at once: `count` vectors, from vector `first` on.
struct Group {
    int64_t first, count;
};

// Inputs of all rows, transposed: for each group, step by step, a vector after the other.
struct Transposed {
    std::vector<Group> groups;
    std::vector<Numbers> numbers;
    int64_t num_steps;

    const Numbers* of(const Group& group) const {
        return numbers.data() + group.first * num_steps * LANES;
    }
};

// Outputs of one weight that are computed at a time.
struct Block {
    const Number* weight;
    // Numbers from one output's weights to the next one's.
    int64_t stride;
    // Where the next block's weights lie in memory.
    const WEIGHT* next;
    int64_t next_stride;
};

#ifdef HAS_TILES
// Return whether the kernel lets this process use tiles.
bool has_tiles() {
    constexpr int64_t REQUEST = 0x1023, TILE_DATA = 18;
    static const bool is_permitted =
        MULTIPLIES_STORED && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
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

// Bytes that a prefetch loads.
constexpr int64_t LINE = 64;

// Fetch the lines of the next block's weights that lie where this block's are read: of STEPS from
// `step` on, for outputs from `first` on. Each group of rows fetches its share of the lines.
template <int64_t OUTPUTS, int64_t STEPS>
inline INLINED void fetch(const Block& block, int64_t first, int64_t step) {
    constexpr int64_t LINES = (STEPS * PAIRED * sizeof(WEIGHT) + LINE - 1) / LINE;
    const WEIGHT* from = block.next + first * block.next_stride + step * PAIRED;
    unrolled<OUTPUTS>([&](auto o) INLINED {
        const char* line = reinterpret_cast<const char*>(from + o * block.next_stride);
        unrolled<LINES>([&](auto i) INLINED { __builtin_prefetch(line + i * LINE, 0, 2); });
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
    const Block& block, int64_t first, const Numbers* rows, int64_t num_steps, int64_t group,
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
    int64_t step = 0, until_fetched = group;
    for (; step + UNROLLED <= num_steps; step += UNROLLED) {
        if (until_fetched-- == 0) {
            fetch<OUTPUTS, UNROLLED>(block, first, step);
            until_fetched = num_groups - 1;
        }
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
    const Block& block, const Numbers* rows, int64_t num_steps, int64_t group, int64_t num_groups,
    REAL* sums) {
    constexpr int64_t OUTPUTS = SUMS / VECTORS;
    for (int64_t first = 0; first < SUMS; first += OUTPUTS) {
        sum_outputs<VECTORS, OUTPUTS>(block, first, rows, num_steps, group, num_groups, sums);
        sums += OUTPUTS * VECTORS * LANES;
    }
}

#ifdef HAS_TILES
// The shapes of tiles: 16 rows of 64 bytes, for all eight.
struct alignas(64) Shapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Sets this thread's tiles, and back when it ends: another library's may be set.
struct ShapedTiles {
    Shapes before;

    ShapedTiles() {
        _tile_storeconfig(&before);
        const Shapes shapes;
        _tile_loadconfig(&shapes);
    }
    ~ShapedTiles() { _tile_loadconfig(&before); }
};

// As `sum_vectors`, for one or two vectors and MOST_OUTPUTS.
template <int64_t VECTORS>
void sum_tiles(
    const Block& block, const Numbers* rows, int64_t num_steps, int64_t group, int64_t num_groups,
    REAL* sums) {
    const int64_t weight_stride = block.stride * sizeof(Number);
    constexpr int64_t stride = VECTORS * LANES * sizeof(Numbers);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < num_steps; step += TILE) {
        if (step / TILE % num_groups == group) fetch<MOST_OUTPUTS, TILE>(block, 0, step);
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
    const Block& block, const Transposed& rows, int64_t group, REAL* sums) {
    const int64_t num_groups = rows.groups.size();
    const Numbers* numbers = rows.of(rows.groups[group]);
    unrolled<MOST_VECTORS>([&](auto index) {
        constexpr int64_t VECTORS = index + 1;
        if (rows.groups[group].count != VECTORS) return;
#ifdef HAS_TILES
        if constexpr (MULTIPLIES_STORED && VECTORS <= 2)
            if (has_tiles())
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
    if constexpr (!MULTIPLIES_STORED) return numbers_at(from);
    Vector found;
    std::memcpy(&found, from, sizeof(found));
    return found;
}

// Transpose rows; the last vector and the last steps are padded with zeros.
Transposed transposed(const Arguments& given, bool is_much) {
    const int64_t num_inputs = given.num_inputs;
    const int64_t num_vectors = (given.num_rows + LANES - 1) / LANES;
    // Groups of nearly equal size: one of a single vector reads as much as a whole one.
    const int64_t most = has_tiles() ? 2 : MOST_VECTORS, num_groups = (num_vectors + most - 1) / most;
    Transposed found;
    found.num_steps = (num_inputs + PAIRED - 1) / PAIRED;
    if (has_tiles()) found.num_steps = (found.num_steps + TILE - 1) / TILE * TILE;
    for (int64_t group = 0; group < num_groups; group++) {
        const int64_t first = num_vectors * group / num_groups;
        found.groups.push_back({first, num_vectors * (group + 1) / num_groups - first});
    }
    found.numbers.resize(num_vectors * LANES * found.num_steps);
    // A square of numbers at a time.
    const int64_t num_parts = (found.num_steps + LANES - 1) / LANES;
    for_each(num_vectors, is_much, [&](int64_t vector) {
        int64_t index = num_groups - 1;
        while (found.groups[index].first > vector) index--;
        const Group& group = found.groups[index];
        const int64_t width = group.count * LANES;
        Numbers* to = found.numbers.data() + group.first * LANES * found.num_steps
            + (vector - group.first) * LANES;
        for (int64_t part = 0; part < num_parts; part++) {
            const int64_t start = part * LANES, end = std::min(start + LANES, found.num_steps);
            Vector square[LANES];
            for (int64_t lane = 0; lane < LANES; lane++) {
                const int64_t row = vector * LANES + lane;
                square[lane] = row < given.num_rows
                    ? numbers_of(given.rows + row * num_inputs, start * PAIRED, num_inputs)
                    : Vector{};
            }
            transpose(square);
            for (int64_t step = start; step < end; step++)
                std::memcpy(to + step * width, &square[step - start], sizeof(Vector));
        }
    });
    return found;
}

// Return a block of a weight's outputs, from `first` to before `last`. They are copied where they
// are not `count` outputs of `num_inputs` numbers that are multiplied as they are.
Block block_of(
    const WEIGHT* weight, int64_t num_inputs, int64_t padded_inputs, int64_t first, int64_t last,
    int64_t count, std::vector<Number>& copied) {
    const WEIGHT* from = weight + first * num_inputs;
    Block block = {nullptr, num_inputs, from + count * num_inputs, num_inputs};
    if constexpr (std::is_same_v<WEIGHT, STORED> && std::is_same_v<STORED, Number>)
        if (last - first == count && padded_inputs == num_inputs) {
            block.weight = reinterpret_cast<const Number*>(from);
            return block;
        }
    copied.assign(count * padded_inputs, Number{});
    for (int64_t output = 0; output < last - first; output++)
        copy_numbers(from + output * num_inputs, num_inputs, copied.data() + output * padded_inputs);
    block.weight = copied.data();
    block.stride = padded_inputs;
    return block;
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

extern "C" void multiply_many(const Arguments* arguments) {
    const Arguments& given = *arguments;
    const int64_t block_size = has_tiles() ? MOST_OUTPUTS : SUMS;
    int64_t total = 0;
    // The first block of each weight, and its first output.
    std::vector<int64_t> first_blocks, first_outputs;
    int64_t num_blocks = 0;
    for (int64_t i = 0; i < given.num_weights; i++) {
        first_blocks.push_back(num_blocks);
        first_outputs.push_back(total);
        num_blocks += (given.sizes[i] + block_size - 1) / block_size;
        total += given.sizes[i];
    }
    const bool is_much = given.num_rows * given.num_inputs * total > LEAST_FOR_THREADS;
    const Transposed rows = transposed(given, is_much);
    const int64_t padded_inputs = rows.num_steps * PAIRED;
    for_each(num_blocks, is_much, [&](int64_t item) {
#ifdef HAS_TILES
        std::optional<ShapedTiles> shaped;
        if (has_tiles()) shaped.emplace();
#endif
        int64_t i = given.num_weights - 1;
        while (first_blocks[i] > item) i--;
        const int64_t first = (item - first_blocks[i]) * block_size;
        const int64_t last = std::min(first + block_size, given.sizes[i]);
        std::vector<Number> copied;
        const Block block = block_of(
            given.weights[i], given.num_inputs, padded_inputs, first, last, block_size, copied);
        const Target target = {
            given.outputs + first_outputs[i] + first,
            total,
            given.biases ? given.biases[i] + first : nullptr,
            last - first,
        };
        // Padded to whole vectors of outputs.
        alignas(64) REAL sums[MOST_OUTPUTS * MOST_VECTORS * LANES];
        for (int64_t group = 0; group < int64_t(rows.groups.size()); group++) {
            sum_block(block, rows, group, sums);
            write(sums, rows.groups[group], given.num_rows, target);
        }
    });
}

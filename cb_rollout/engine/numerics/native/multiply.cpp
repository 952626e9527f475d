// Products of rows with a linear layer's weight; of few rows each weight is read from memory once.
//
// Each output is one sum in one order, whatever the number of rows.
//
// A tile of outputs is summed in registers: TILE_OUTPUTS rows of the weight times TILE_ROWS input
// rows, vector by vector along their inputs. The weight's next rows are prefetched meanwhile.
//
// Follows vectors.h.

#include <vector>

namespace {

// Twelve sums, three vectors of the weight and one of a row fill the sixteen registers of AVX2. AVX-512
// has 32.
#ifdef __AVX512F__
constexpr int64_t TILE_OUTPUTS = 6, TILE_ROWS = 4;
#else
constexpr int64_t TILE_OUTPUTS = 3, TILE_ROWS = 4;
#endif

// Half of a small second-level cache. Fewer rows than LEAST_BLOCK_ROWS are never parted.
constexpr int64_t CACHE_BYTES = 1 << 17, LEAST_BLOCK_ROWS = 64;

// The numbers that one prefetch loads.
constexpr int64_t NUMBERS_PER_LINE = 64 / sizeof(STORED);

struct Product {
    // The parts of each row's blocks, the last block padded with zeros.
    const REAL* rows;
    const STORED* weight;
    // One number for each output, or null.
    const STORED* bias;
    STORED* outputs;
    int64_t num_rows, num_inputs, num_outputs;
};

template <int64_t OUTPUTS, int64_t ROWS>
inline void multiply_tile(const Product& product, int64_t output, int64_t row, bool fetches) {
    const int64_t count = product.num_inputs, row_size = blocks_of(count) * BLOCK;
    const STORED* weight = product.weight + output * count;
    const REAL* given = product.rows + row * row_size;
    Vector sums[OUTPUTS][ROWS] = {};
    const auto add = [&](int64_t i, const auto& part_from) {
        for (int64_t part = 0; part < PARTS; part++) {
            Vector weights[OUTPUTS];
            for (int64_t o = 0; o < OUTPUTS; o++)
                weights[o] = part_from(weight + o * count + i, part);
            for (int64_t r = 0; r < ROWS; r++) {
                const Vector numbers = lanes_at(given + r * row_size + i + part * LANES);
                for (int64_t o = 0; o < OUTPUTS; o++)
                    sums[o][r] = fused(weights[o], numbers, sums[o][r]);
            }
        }
    };
    const int64_t rest = count % BLOCK;
    for (int64_t i = 0; i < count - rest; i += BLOCK) {
        if (fetches && i % NUMBERS_PER_LINE == 0)
            for (int64_t o = 0; o < OUTPUTS; o++)
                __builtin_prefetch(weight + (OUTPUTS + o) * count + i);
        add(i, [](const STORED* from, int64_t part) { return part_at(from, part); });
    }
    if (rest)
        add(count - rest, [&](const STORED* from, int64_t part) {
            return part_of_first(from, rest, part);
        });
    STORED* outputs = product.outputs + row * product.num_outputs + output;
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t o = 0; o < OUTPUTS; o++) {
            const REAL bias = product.bias ? real(product.bias[output + o]) : 0;
            store(sum_of(sums[o][r]) + bias, outputs + r * product.num_outputs + o);
        }
}

// Multiply rows from `first` to before `last`, in tiles of nearly equal size: a tile of one row reads
// as much as one of four.
template <int64_t OUTPUTS>
inline void multiply_outputs(const Product& product, int64_t output, int64_t first, int64_t last) {
    const int64_t count = last - first, num_tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t tile = 0, row = first; tile < num_tiles; tile++) {
        const int64_t end = first + count * (tile + 1) / num_tiles;
        const bool fetches = tile == 0;
        switch (end - row) {
            case 1: multiply_tile<OUTPUTS, 1>(product, output, row, fetches); break;
            case 2: multiply_tile<OUTPUTS, 2>(product, output, row, fetches); break;
            case 3: multiply_tile<OUTPUTS, 3>(product, output, row, fetches); break;
            default: multiply_tile<OUTPUTS, TILE_ROWS>(product, output, row, fetches);
        }
        row = end;
    }
}

// Return the parts of each row's blocks, the last block padded with zeros.
std::vector<REAL> parts_of(const STORED* rows, int64_t num_rows, int64_t num_inputs) {
    const int64_t row_size = blocks_of(num_inputs) * BLOCK;
    std::vector<REAL> parts(num_rows * row_size);
    for (int64_t row = 0; row < num_rows; row++)
        widen(rows + row * num_inputs, num_inputs, parts.data() + row * row_size);
    return parts;
}

}  // namespace

extern "C" void multiply(
    const STORED* rows,
    const STORED* weight,
    const STORED* bias,
    STORED* outputs,
    int64_t num_rows,
    int64_t num_inputs,
    int64_t num_outputs) {
    const std::vector<REAL> given = parts_of(rows, num_rows, num_inputs);
    const Product product = {
        given.data(), weight, bias, outputs, num_rows, num_inputs, num_outputs,
    };
    const bool is_much = num_rows * num_inputs * num_outputs > LEAST_FOR_THREADS;
    // Rows that stay in a near cache while all weights pass by; few rows are one block.
    const int64_t row_bytes = blocks_of(num_inputs) * BLOCK * sizeof(REAL);
    const int64_t fitting = (CACHE_BYTES / row_bytes + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    const int64_t block_rows = fitting < LEAST_BLOCK_ROWS ? LEAST_BLOCK_ROWS : fitting;
    const int64_t num_blocks = (num_rows + block_rows - 1) / block_rows;
    const int64_t num_tiles = (num_outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    for_each(num_blocks * num_tiles, is_much, [&](int64_t item) {
        const int64_t first = item / num_tiles * block_rows;
        const int64_t last = first + block_rows < num_rows ? first + block_rows : num_rows;
        const int64_t output = item % num_tiles * TILE_OUTPUTS;
        if (output + TILE_OUTPUTS <= num_outputs) {
            multiply_outputs<TILE_OUTPUTS>(product, output, first, last);
            return;
        }
        for (int64_t one = output; one < num_outputs; one++)
            multiply_outputs<1>(product, one, first, last);
    });
}

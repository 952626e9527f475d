// Products of few rows with a linear layer's weight, which is read from memory once. For many rows,
// multiply_many.cpp is faster; this kernel takes any number of them where their bits must not depend
// on it.
//
// Each output is one sum in one order, whatever the number of rows.
//
// A tile of outputs is summed in registers: TILE_OUTPUTS rows of the weight times TILE_ROWS input
// rows, block by block along their inputs. The weight's next rows are prefetched meanwhile.
//
// Follows vectors.h.

#include <omp.h>

#include <algorithm>
#include <vector>

namespace {

// The sums of a tile, a vector of each of its outputs and one of a row fill most registers: AVX-512
// has 32, AVX2 16.
#ifdef __AVX512F__
constexpr int64_t TILE_ROWS = 6;
#else
constexpr int64_t TILE_ROWS = 2;
#endif
constexpr int64_t TILE_OUTPUTS = 4;

// Outputs whose weights stay in a second-level cache while blocks of rows, which stay in a first-level
// one, pass by.
constexpr int64_t BLOCK_OUTPUTS = 8 * TILE_OUTPUTS;
constexpr int64_t CACHE_BYTES = 24 << 10;

// The numbers that one prefetch loads.
constexpr int64_t NUMBERS_PER_LINE = 64 / sizeof(STORED);

struct Product {
    // The operands of each row's blocks, the last block padded with zeros.
    const Operand* rows;
    const STORED* weight;
    // One number for each output, or null.
    const STORED* bias;
    STORED* outputs;
    int64_t num_rows, num_inputs, num_outputs;
};

template <int64_t ROWS>
inline void multiply_tile(const Product& product, int64_t output, int64_t row, bool fetches) {
    const int64_t count = product.num_inputs, row_size = blocks_of(count) * OPERANDS;
    const int64_t num_outputs = product.num_outputs, rest = count % BLOCK;
    const Operand* given = product.rows + row * row_size;
    // Beyond the last output it is computed again.
    const STORED* weights[TILE_OUTPUTS];
    for (int64_t o = 0; o < TILE_OUTPUTS; o++)
        weights[o] = product.weight + (output + o < num_outputs ? output + o : num_outputs - 1) * count;
    Vector sums[ROWS][TILE_OUTPUTS] = {};
    const auto add = [&](int64_t i, int64_t left) INLINED {
        unrolled<OPERANDS>([&](auto part) INLINED {
            Operand operands[TILE_OUTPUTS];
            unrolled<TILE_OUTPUTS>(
                [&](auto o) INLINED { operands[o] = operand_at(weights[o] + i, part, left); });
            unrolled<ROWS>([&](auto r) INLINED {
                const Operand numbers = given[r * row_size + i / BLOCK * OPERANDS + part];
                unrolled<TILE_OUTPUTS>(
                    [&](auto o) INLINED { sums[r][o] = fused(operands[o], numbers, sums[r][o]); });
            });
        });
    };
    for (int64_t i = 0; i < count - rest; i += BLOCK) {
        if (fetches && i % NUMBERS_PER_LINE == 0)
            unrolled<TILE_OUTPUTS>(
                [&](auto o) INLINED { __builtin_prefetch(weights[o] + TILE_OUTPUTS * count + i, 0, 2); });
        add(i, BLOCK);
    }
    if (rest) add(count - rest, rest);
    unrolled<ROWS>([&](auto r) INLINED {
        REAL numbers[TILE_OUTPUTS];
        sums_of(sums[r], numbers);
        for (int64_t o = 0; o < TILE_OUTPUTS && output + o < num_outputs; o++) {
            const REAL bias = product.bias ? real(product.bias[output + o]) : 0;
            store(numbers[o] + bias, product.outputs + (row + r) * num_outputs + output + o);
        }
    });
}

// Multiply rows from `first` to before `last`, in tiles of nearly equal size: a tile of one row reads
// as much as a whole one.
inline void multiply_rows(const Product& product, int64_t output, int64_t first, int64_t last) {
    const int64_t count = last - first, num_tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t tile = 0, row = first; tile < num_tiles; tile++) {
        const int64_t end = first + count * (tile + 1) / num_tiles;
        unrolled<TILE_ROWS>([&](auto index) {
            if (end - row == index + 1)
                multiply_tile<index + 1>(product, output, row, row == 0);
        });
        row = end;
    }
}

// Return the operands of each row's blocks, the last block padded with zeros.
std::vector<Operand> operands_of(const STORED* rows, int64_t num_rows, int64_t num_inputs) {
    std::vector<Operand> operands;
    operands.reserve(num_rows * blocks_of(num_inputs) * OPERANDS);
    for (int64_t row = 0; row < num_rows; row++, rows += num_inputs)
        for (int64_t i = 0; i < num_inputs; i += BLOCK)
            for (int64_t part = 0; part < OPERANDS; part++)
                operands.push_back(operand_at(rows + i, part, num_inputs - i));
    return operands;
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
    const std::vector<Operand> given = operands_of(rows, num_rows, num_inputs);
    const Product product = {
        given.data(), weight, bias, outputs, num_rows, num_inputs, num_outputs,
    };
    const bool is_much = num_rows * num_inputs * num_outputs > LEAST_FOR_THREADS;
    const int64_t row_bytes = blocks_of(num_inputs) * OPERANDS * sizeof(Operand);
    const int64_t fitting = CACHE_BYTES / row_bytes / TILE_ROWS * TILE_ROWS;
    const int64_t block_rows = fitting < 2 * TILE_ROWS ? 2 * TILE_ROWS : fitting;
    // Threads share the outputs.
    int64_t block_outputs = BLOCK_OUTPUTS;
    while (block_outputs > TILE_OUTPUTS && num_outputs < 4 * block_outputs * omp_get_max_threads())
        block_outputs /= 2;
    const int64_t num_blocks = (num_outputs + block_outputs - 1) / block_outputs;
    for_each(num_blocks, is_much, [&](int64_t block) {
        const int64_t first = block * block_outputs;
        const int64_t end = std::min(first + block_outputs, num_outputs);
        for (int64_t row = 0; row < num_rows; row += block_rows)
            for (int64_t output = first; output < end; output += TILE_OUTPUTS)
                multiply_rows(product, output, row, std::min(row + block_rows, num_rows));
    });
}

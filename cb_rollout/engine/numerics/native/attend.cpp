// Attention of a decode step on a CPU: one new token a row, over paged keys.
//
// Write each row's new key and value into its page, then attend over the row's keys in the pages:
// all heads of a row together, so that memory is read in order, a tile of keys at a time, with an
// online softmax.
//
// Follows pages.h. The loader defines NUM_HEADS, NUM_KEY_HEADS, KEY_SIZE and VALUE_SIZE.

#include <omp.h>

#include <algorithm>

namespace {

constexpr int64_t HEADS_PER_KEY = NUM_HEADS / NUM_KEY_HEADS;
constexpr int64_t TILE_KEYS = 32;

// Operands of one key and vectors of one value, the last block padded with zeros.
constexpr int64_t KEY_OPERANDS = blocks_of(KEY_SIZE) * OPERANDS;
constexpr int64_t VALUE_VECTORS = blocks_of(VALUE_SIZE) * PARTS;

// Sums of four keys or four vectors of values, for so many heads, fill twelve registers.
constexpr int64_t MOST_HEADS = 3;

// Return the `index`-th operand of a key or query, padded with zeros.
inline INLINED Operand operand_of(const STORED* from, int64_t index) {
    const int64_t start = index / OPERANDS * BLOCK;
    return operand_at(from + start, index % OPERANDS, KEY_SIZE - start);
}

// Return the `index`-th vector of a value, padded with zeros.
inline INLINED Vector vector_of(const STORED* from, int64_t index) {
    const int64_t start = index / PARTS * BLOCK;
    return part_at(from + start, index % PARTS, VALUE_SIZE - start);
}

// Call `work` with the first head and the number of heads of each group of a key head's queries.
template <typename Work>
inline INLINED void for_head_groups(const Work& work) {
    unrolled<(HEADS_PER_KEY + MOST_HEADS - 1) / MOST_HEADS>([&](auto group) INLINED {
        constexpr int64_t first = group * MOST_HEADS, rest = HEADS_PER_KEY - first;
        work(
            std::integral_constant<int64_t, first>{},
            std::integral_constant<int64_t, rest < MOST_HEADS ? rest : MOST_HEADS>{});
    });
}

// Addresses of neighbouring keys and values of a row, all their heads together.
struct Tile {
    int64_t count;
    const STORED* keys[TILE_KEYS];
    const STORED* values[TILE_KEYS];

    // Look up the keys from `start` on, and prefetch the heads from `first` to `last`.
    void find(
        const Step& step, int64_t row, int64_t start, int64_t end, int64_t first, int64_t last) {
        count = std::max<int64_t>(0, std::min(end - start, TILE_KEYS));
        int64_t slot = 0, left = 0;
        for (int64_t t = 0; t < count; t++, slot++, left--) {
            if (left == 0) {
                slot = step.slot_of(row, start + t);
                left = step.block_size - (start + t) % step.block_size;
            }
            keys[t] = step.keys + slot * (NUM_KEY_HEADS * KEY_SIZE);
            values[t] = step.values + slot * (NUM_KEY_HEADS * VALUE_SIZE);
            fetch(keys[t] + first * KEY_SIZE, (last - first) * KEY_SIZE);
            fetch(values[t] + first * VALUE_SIZE, (last - first) * VALUE_SIZE);
        }
        // Keys are read four at a time.
        for (int64_t t = count; t % 4; t++) keys[t] = keys[count - 1];
    }

    static void fetch(const STORED* from, int64_t count) {
        for (int64_t i = 0; i < count; i += 64 / sizeof(STORED)) __builtin_prefetch(from + i, 0, 2);
    }
};

// The partial results of one key head's queries.
struct Partial {
    Vector outputs[HEADS_PER_KEY][VALUE_VECTORS];
    REAL largest[HEADS_PER_KEY], totals[HEADS_PER_KEY];
};

// Attend over a tile of keys and values with the queries of one key head.
void attend_tile(
    const Step& step,
    const Operand (&queries)[HEADS_PER_KEY][KEY_OPERANDS],
    const Tile& tile,
    int64_t key_head,
    Partial& partial) {
    const int64_t count = tile.count;
    const REAL scale = REAL(step.scale), softcap = REAL(step.softcap);
    alignas(VECTOR_BYTES) REAL weights[HEADS_PER_KEY][TILE_KEYS];
    for (int64_t t = 0; t < count; t += 4)
        for_head_groups([&](auto first, auto num_heads) INLINED {
            Vector sums[num_heads()][4] = {};
            unrolled<KEY_OPERANDS>([&](auto i) INLINED {
                unrolled<4>([&](auto n) INLINED {
                    const Operand key = operand_of(tile.keys[t + n] + key_head * KEY_SIZE, i);
                    unrolled<num_heads()>([&](auto g) INLINED {
                        sums[g][n] = fused(key, queries[first + g][i], sums[g][n]);
                    });
                });
            });
            unrolled<num_heads()>([&](auto g) INLINED {
                REAL* scores = weights[first + g] + t;
                sums_of(sums[g], scores);
                for (int64_t n = 0; n < 4; n++) scores[n] *= scale;
            });
        });
    for (int64_t g = 0; g < HEADS_PER_KEY; g++) {
        REAL* scores = weights[g];
        for (int64_t t = count; t < TILE_KEYS; t++) scores[t] = -INFINITE;
        if (softcap != 0)
            for (int64_t t = 0; t < count; t++) scores[t] = softcap * std::tanh(scores[t] / softcap);
        const REAL largest = largest_of(scores, TILE_KEYS, partial.largest[g]);
        const REAL total = exponentials(scores, TILE_KEYS, largest);
        if (largest != partial.largest[g]) {
            const REAL shrink = std::exp(partial.largest[g] - largest);
            partial.totals[g] *= shrink;
            partial.largest[g] = largest;
            for (int64_t i = 0; i < VALUE_VECTORS; i++) partial.outputs[g][i] *= shrink;
        }
        partial.totals[g] += total;
    }
    for_head_groups([&](auto first, auto num_heads) INLINED {
        unrolled<(VALUE_VECTORS + 3) / 4>([&](auto group) INLINED {
            constexpr int64_t start = group * 4, rest = VALUE_VECTORS - start;
            constexpr int64_t num_vectors = rest < 4 ? rest : 4;
            Vector sums[num_heads()][num_vectors];
            unrolled<num_heads()>([&](auto g) INLINED {
                unrolled<num_vectors>(
                    [&](auto i) INLINED { sums[g][i] = partial.outputs[first + g][start + i]; });
            });
            for (int64_t t = 0; t < count; t++) {
                const STORED* value = tile.values[t] + key_head * VALUE_SIZE;
                unrolled<num_vectors>([&](auto i) INLINED {
                    const Vector part = vector_of(value, start + i);
                    unrolled<num_heads()>([&](auto g) INLINED {
                        sums[g][i] = fused(filled(weights[first + g][t]), part, sums[g][i]);
                    });
                });
            }
            unrolled<num_heads()>([&](auto g) INLINED {
                unrolled<num_vectors>(
                    [&](auto i) INLINED { partial.outputs[first + g][start + i] = sums[g][i]; });
            });
        });
    });
}

void attend_row(const Step& step, int64_t row, int64_t first, int64_t last) {
    Operand queries[NUM_KEY_HEADS][HEADS_PER_KEY][KEY_OPERANDS];
    Partial partials[NUM_KEY_HEADS];
    for (int64_t head = first; head < last; head++)
        for (int64_t g = 0; g < HEADS_PER_KEY; g++) {
            STORED query[KEY_SIZE];
            step.queries.copy(row, head * HEADS_PER_KEY + g, KEY_SIZE, query);
            for (int64_t i = 0; i < KEY_OPERANDS; i++) queries[head][g][i] = operand_of(query, i);
            for (int64_t i = 0; i < VALUE_VECTORS; i++) partials[head].outputs[g][i] = Vector{};
            partials[head].largest[g] = -INFINITE;
            partials[head].totals[g] = 0;
        }
    const int64_t length = step.lengths[row];
    int64_t start = step.first_seen(row);
    Tile tiles[2];
    tiles[0].find(step, row, start, length, first, last);
    for (int64_t index = 0; start < length; start += TILE_KEYS, index ^= 1) {
        tiles[index ^ 1].find(step, row, start + TILE_KEYS, length, first, last);
        for (int64_t head = first; head < last; head++)
            attend_tile(step, queries[head], tiles[index], head, partials[head]);
    }
    for (int64_t head = first; head < last; head++)
        for (int64_t g = 0; g < HEADS_PER_KEY; g++) {
            const Vector(&output)[VALUE_VECTORS] = partials[head].outputs[g];
            const REAL largest = partials[head].largest[g], total = partials[head].totals[g];
            const int64_t query_head = head * HEADS_PER_KEY + g;
            REAL share = 1 / total;
            if (step.sinks) {
                const REAL sink = real(step.sinks[query_head]);
                const REAL most = sink > largest ? sink : largest;
                const REAL shrink = std::exp(largest - most);
                share = shrink / (total * shrink + std::exp(sink - most));
            }
            STORED* to = step.outputs + (row * NUM_HEADS + query_head) * VALUE_SIZE;
            for (int64_t i = 0; i < VALUE_SIZE; i++) {
                const Vector& part = output[i / BLOCK * PARTS + i % PARTS];
                store(part[i % BLOCK / PARTS] * share, to + i);
            }
        }
}

}  // namespace

extern "C" void attend(const Step* given) {
    const Step& step = *given;
    if (step.num_rows == 0) return;
    step.write();
    // With few rows, different threads compute different key heads. Rows of one prompt follow each
    // other, so that its keys are read from a near cache.
    const int64_t wanted = (2 * omp_get_max_threads() + step.num_rows - 1) / step.num_rows;
    const int64_t num_parts = wanted < NUM_KEY_HEADS ? wanted : NUM_KEY_HEADS;
    for_each(step.num_rows * num_parts, step.is_much(), [&](int64_t item) {
        const int64_t part = item % num_parts;
        attend_row(
            step,
            item / num_parts,
            NUM_KEY_HEADS * part / num_parts,
            NUM_KEY_HEADS * (part + 1) / num_parts);
    });
}

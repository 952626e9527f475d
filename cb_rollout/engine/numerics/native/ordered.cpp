// Attention and products whose bits depend on nothing but the numbers they are made of.
//
// Each sum is one chain of fused multiply-adds in the order of its terms, or is made of vectors
// within one key or query. A key that is not seen has the weight zero, which leaves a chain as it
// was. So no other row, no padding, no chunk and no number of threads changes a bit.
//
// Follows pages.h.

#include <algorithm>
#include <vector>

namespace {

// Queries of one key head that are computed together.
constexpr int64_t QUERIES = 4;

// Vectors of a value that are summed in registers: with four queries, twelve of the sixteen of AVX2.
constexpr int64_t VECTORS = 3;

// The mask of scores: none, one byte a key (0: not seen), or a number to add.
enum Mask : int64_t { NONE, BOOLEAN, ADDED };

struct Settings {
    int64_t key_size, value_size;
    REAL scale, softcap;
    // One number for each query head, or null.
    const STORED* sinks;
    int64_t mask_kind, mask_stride;
};

// A query, the keys it may see, and where its output goes.
struct Query {
    const STORED* from;
    STORED* to;
    int64_t head;
    // It sees keys from `first` to before `last`, of those that the mask leaves.
    int64_t first, last;
    // Of key 0; null: no mask.
    const char* mask;
};

// Keys and values of one sequence and key head.
struct Keys {
    std::vector<const STORED*> keys, values;
};

// Write the products of COUNT queries with one key.
template <int64_t COUNT>
inline void multiply_key(
    const REAL* queries, int64_t row_size, const STORED* key, int64_t size,
    REAL (&products)[QUERIES]) {
    const int64_t rest = size % BLOCK;
    Vector sums[QUERIES] = {};
    const auto add = [&](int64_t i, int64_t left) INLINED {
        unrolled<PARTS>([&](auto part) INLINED {
            const Vector numbers = part_at(key + i, part, left);
            unrolled<COUNT>([&](auto q) INLINED {
                const REAL* query = queries + q * row_size + i + part * LANES;
                sums[q] = fused(lanes_at(query), numbers, sums[q]);
            });
        });
    };
    for (int64_t i = 0; i < size - rest; i += BLOCK) add(i, BLOCK);
    if (rest) add(size - rest, rest);
    sums_of(sums, products);
}

// Add weighted values to VECTORS sums of each of COUNT queries, key after key.
template <int64_t COUNT, int64_t PARTS_AT_ONCE>
inline void add_values(
    const REAL* weights, int64_t padded, const Keys& keys, int64_t first, int64_t last,
    int64_t block, int64_t value_size, Vector (&sums)[COUNT][VECTORS]) {
    Vector own[COUNT][PARTS_AT_ONCE] = {};
    for (int64_t t = first; t < last; t++) {
        const STORED* value = keys.values[t];
        unrolled<PARTS_AT_ONCE>([&](auto i) INLINED {
            const int64_t number = block + i, start = number / PARTS * BLOCK;
            const Vector numbers = part_at(value + start, number % PARTS, value_size - start);
            unrolled<COUNT>([&](auto q) INLINED {
                const Vector weight = filled(weights[q * padded + t - first]);
                own[q][i] = fused(weight, numbers, own[q][i]);
            });
        });
    }
    unrolled<COUNT>([&](auto q) INLINED {
        unrolled<PARTS_AT_ONCE>([&](auto i) INLINED { sums[q][i] = own[q][i]; });
    });
}

template <int64_t COUNT>
void attend_queries(
    const Settings& settings, const Query* queries, const Keys& keys, std::vector<REAL>& scores,
    std::vector<REAL>& widened) {
    const int64_t key_size = settings.key_size, value_size = settings.value_size;
    const int64_t row_size = blocks_of(key_size) * BLOCK;
    widened.resize(COUNT * row_size);
    int64_t first = queries[0].first, last = queries[0].last;
    for (int64_t q = 0; q < COUNT; q++) {
        widen(queries[q].from, key_size, widened.data() + q * row_size);
        first = std::min(first, queries[q].first);
        last = std::max(last, queries[q].last);
    }
    const int64_t count = last - first, padded = (count + LANES - 1) / LANES * LANES;
    scores.resize(COUNT * padded + LANES);
    for (int64_t t = first; t < last; t++) {
        REAL products[QUERIES];
        multiply_key<COUNT>(widened.data(), row_size, keys.keys[t], key_size, products);
        for (int64_t q = 0; q < COUNT; q++) {
            const Query& query = queries[q];
            bool is_seen = t >= query.first && t < query.last;
            if (is_seen && settings.mask_kind == BOOLEAN)
                is_seen = query.mask[t * settings.mask_stride] != 0;
            REAL score = -INFINITE;
            if (is_seen) {
                score = products[q] * settings.scale;
                if (settings.softcap != 0)
                    score = settings.softcap * std::tanh(score / settings.softcap);
                if (settings.mask_kind == ADDED)
                    score += real(reinterpret_cast<const STORED*>(query.mask)[t * settings.mask_stride]);
            }
            scores[q * padded + t - first] = score;
        }
    }
    REAL shares[COUNT];
    for (int64_t q = 0; q < COUNT; q++) {
        REAL* own = scores.data() + q * padded;
        for (int64_t t = count; t < padded; t++) own[t] = -INFINITE;
        REAL most = largest_of(own, padded, -INFINITE);
        const REAL sink = settings.sinks ? real(settings.sinks[queries[q].head]) : -INFINITE;
        most = sink > most ? sink : most;
        // A query that sees nothing has the output zero.
        if (most == -INFINITE) most = 0;
        exponentials(own, padded, most);
        shares[q] = settings.sinks ? std::exp(sink - most) : 0;
    }
    for (int64_t t = 0; t < count; t++)
        for (int64_t q = 0; q < COUNT; q++) shares[q] += scores[q * padded + t];
    for (int64_t q = 0; q < COUNT; q++) shares[q] = shares[q] == 0 ? 0 : 1 / shares[q];
    const int64_t num_vectors = blocks_of(value_size) * PARTS;
    for (int64_t block = 0; block < num_vectors; block += VECTORS) {
        Vector sums[COUNT][VECTORS] = {};
        const int64_t num_parts = std::min(VECTORS, num_vectors - block);
        unrolled<VECTORS>([&](auto index) INLINED {
            if (index + 1 == num_parts)
                add_values<COUNT, index + 1>(
                    scores.data(), padded, keys, first, last, block, value_size, sums);
        });
        for (int64_t q = 0; q < COUNT; q++)
            // A bound that is known when compiled keeps the sums in registers.
            for (int64_t i = 0; i < VECTORS && i < num_parts; i++)
                for (int64_t lane = 0; lane < LANES; lane++) {
                    // A block's parts hold its numbers in turns.
                    const int64_t number =
                        (block + i) / PARTS * BLOCK + lane * PARTS + (block + i) % PARTS;
                    if (number < value_size) store(sums[q][i][lane] * shares[q], queries[q].to + number);
                }
    }
}

// Attend with the queries of one key head.
void attend_all(const Settings& settings, const std::vector<Query>& queries, const Keys& keys) {
    std::vector<REAL> scores, widened;
    int64_t q = 0, count = queries.size();
    for (; q + QUERIES <= count; q += QUERIES)
        attend_queries<QUERIES>(settings, queries.data() + q, keys, scores, widened);
    for (; q < count; q++)
        attend_queries<1>(settings, queries.data() + q, keys, scores, widened);
}

}  // namespace

// Attend with queries of any number, masked: `[B, H, Q, D]` by strides of rows, heads and tokens.
//
// With `is_causal` the last query sees all keys, and each one before sees one less.
extern "C" void attend_masked(
    const STORED* queries, int64_t query_row, int64_t query_head, int64_t query_token,
    const STORED* keys, int64_t key_row, int64_t key_head, int64_t key_token,
    const STORED* values, int64_t value_row, int64_t value_head, int64_t value_token,
    STORED* outputs,
    const char* mask, int64_t mask_kind, int64_t mask_row, int64_t mask_head, int64_t mask_query,
    int64_t mask_key,
    int64_t num_rows, int64_t num_heads, int64_t num_key_heads, int64_t num_queries,
    int64_t num_keys, int64_t key_size, int64_t value_size,
    double scale, double softcap, int64_t is_causal, const STORED* sinks) {
    const Settings settings = {
        key_size, value_size, REAL(scale), REAL(softcap), sinks, mask_kind, mask_key,
    };
    const int64_t group = num_heads / num_key_heads;
    const int64_t mask_size = mask_kind == ADDED ? sizeof(STORED) : 1;
    // Some queries of one key head at a time, so that threads have enough to share.
    constexpr int64_t AT_ONCE = 64;
    const int64_t num_parts = (num_queries + AT_ONCE - 1) / AT_ONCE;
    const bool is_much =
        num_rows * num_heads * num_queries * num_keys * (key_size + value_size) > LEAST_FOR_THREADS;
    for_each(num_rows * num_key_heads * num_parts, is_much, [&](int64_t item) {
        const int64_t part = item % num_parts, row = item / num_parts / num_key_heads;
        const int64_t head = item / num_parts % num_key_heads;
        const int64_t start = part * AT_ONCE, end = std::min(start + AT_ONCE, num_queries);
        Keys own;
        for (int64_t t = 0; t < num_keys; t++) {
            own.keys.push_back(keys + row * key_row + head * key_head + t * key_token);
            own.values.push_back(values + row * value_row + head * value_head + t * value_token);
        }
        std::vector<Query> tile;
        for (int64_t h = head * group; h < (head + 1) * group; h++)
            for (int64_t q = start; q < end; q++) {
                const char* seen = mask_kind == NONE ? nullptr
                    : mask + (row * mask_row + h * mask_head + q * mask_query) * mask_size;
                tile.push_back({
                    queries + row * query_row + h * query_head + q * query_token,
                    outputs + ((row * num_queries + q) * num_heads + h) * value_size,
                    h, 0, is_causal ? num_keys - num_queries + q + 1 : num_keys, seen,
                });
                Query& query = tile.back();
                // Leave out the keys at both ends that are not seen.
                if (mask_kind == BOOLEAN) {
                    while (query.last > 0 && !seen[(query.last - 1) * mask_key]) query.last--;
                    while (query.first < query.last && !seen[query.first * mask_key]) query.first++;
                }
            }
        attend_all(settings, tile, own);
    });
}

// Write each row's newest key and value, and attend over its keys in the pages; see attend.cpp. The
// last stride of queries is 1.
extern "C" void attend_paged(const Step* given) {
    const Step& step = *given;
    const int64_t num_heads = step.num_heads, num_key_heads = step.num_key_heads;
    const int64_t key_size = step.key_size, value_size = step.value_size;
    const Settings settings = {
        key_size, value_size, REAL(step.scale), REAL(step.softcap), step.sinks, NONE, 0,
    };
    const int64_t group = num_heads / num_key_heads;
    step.write();
    for_each(step.num_rows * num_key_heads, step.is_much(), [&](int64_t item) {
        const int64_t row = item / num_key_heads, head = item % num_key_heads;
        const int64_t first = step.first_seen(row), length = step.lengths[row];
        Keys own;
        for (int64_t t = first; t < length; t++) {
            const int64_t place = step.slot_of(row, t) * num_key_heads + head;
            own.keys.push_back(step.keys + place * key_size);
            own.values.push_back(step.values + place * value_size);
        }
        std::vector<Query> tile;
        for (int64_t h = head * group; h < (head + 1) * group; h++)
            tile.push_back({
                step.queries.first + row * step.queries.row_stride + h * step.queries.head_stride,
                step.outputs + (row * num_heads + h) * value_size, h, 0, length - first, nullptr,
            });
        attend_all(settings, tile, own);
    });
}

// Multiply matrices, `[B, M, K]` by strides of all three and `[B, K, N]` by two, into `[B, M, N]`.
extern "C" void multiply_batch(
    const STORED* left, int64_t left_batch, int64_t left_row, int64_t left_number,
    const STORED* right, int64_t right_batch, int64_t right_row,
    STORED* outputs, int64_t num_batches, int64_t num_rows, int64_t num_inputs,
    int64_t num_outputs) {
    constexpr int64_t ROWS = 4;
    const int64_t num_tiles = (num_rows + ROWS - 1) / ROWS;
    const bool is_much = num_batches * num_rows * num_inputs * num_outputs > LEAST_FOR_THREADS;
    for_each(num_batches * num_tiles, is_much, [&](int64_t item) {
        const int64_t batch = item / num_tiles, start = item % num_tiles * ROWS;
        const int64_t count = std::min(ROWS, num_rows - start);
        const STORED* rows = left + batch * left_batch + start * left_row;
        const STORED* matrix = right + batch * right_batch;
        STORED* to = outputs + (batch * num_rows + start) * num_outputs;
        for (int64_t n = 0; n < num_outputs; n += BLOCK) {
            const int64_t width = std::min(BLOCK, num_outputs - n);
            Vector sums[ROWS][PARTS] = {};
            for (int64_t k = 0; k < num_inputs; k++) {
                const STORED* from = matrix + k * right_row + n;
                unrolled<PARTS>([&](auto part) INLINED {
                    const Vector numbers = part_at(from, part, width);
                    unrolled<ROWS>([&](auto r) INLINED {
                        // Rows past the last are computed as the last one, and not stored.
                        const int64_t own = r < count ? r : count - 1;
                        const Vector number = filled(real(rows[own * left_row + k * left_number]));
                        sums[r][part] = fused(number, numbers, sums[r][part]);
                    });
                });
            }
            unrolled<ROWS>([&](auto r) INLINED {
                for (int64_t i = 0; r < count && i < width; i++) {
                    const Vector& own = sums[r][i % PARTS];
                    store(own[i / PARTS], to + r * num_outputs + n + i);
                }
            });
        }
    });
}

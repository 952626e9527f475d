// A decode step over paged keys: one new token a row. Follows vectors.h.

namespace {

// Queries, keys or values of the new tokens, with strides in numbers.
struct States {
    const STORED* first;
    int64_t row_stride, head_stride, stride;

    void copy(int64_t row, int64_t head, int64_t count, STORED* to) const {
        const STORED* from = first + row * row_stride + head * head_stride;
        for (int64_t i = 0; i < count; i++) to[i] = from[i * stride];
    }
};

// Has the fields of `Step` in cpu/backend.py. A window, a softcap or sinks of 0 mean none.
struct Step {
    States queries, new_keys, new_values;
    STORED *outputs, *keys, *values;
    const int64_t* table;
    int64_t table_width, block_size;
    const int64_t *table_rows, *lengths;
    int64_t num_rows, num_heads, num_key_heads, key_size, value_size;
    double scale, softcap;
    int64_t window;
    // One number for each query head, or null.
    const STORED* sinks;

    int64_t slot_of(int64_t row, int64_t position) const {
        const int64_t* blocks = table + table_rows[row] * table_width;
        return blocks[position / block_size] * block_size + position % block_size;
    }

    int64_t first_seen(int64_t row) const {
        return window && window < lengths[row] ? lengths[row] - window : 0;
    }

    // Return whether threads pay off.
    bool is_much() const {
        int64_t num_keys = 0;
        for (int64_t row = 0; row < num_rows; row++) num_keys += lengths[row];
        return num_keys * num_heads * (key_size + value_size) > LEAST_FOR_THREADS;
    }

    // Write each row's new key and value into its page.
    void write() const {
        for_each(num_rows, is_much(), [&](int64_t row) {
            const int64_t slot = slot_of(row, lengths[row] - 1);
            for (int64_t head = 0; head < num_key_heads; head++) {
                const int64_t written = slot * num_key_heads + head;
                new_keys.copy(row, head, key_size, keys + written * key_size);
                new_values.copy(row, head, value_size, values + written * value_size);
            }
        });
    }
};

}  // namespace

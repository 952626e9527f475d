// What layers do between their products, for a few rows: each function what took several operators.
//
// Stands below vectors.h. Given is REAL, float or double.

namespace {

// A row a vector at a time: `work` gets where it starts and how many numbers it has.
template <typename Work>
inline void for_vectors(int64_t count, const Work& work) {
    for (int64_t i = 0; i < count; i += LANES) work(i, count - i < LANES ? count - i : LANES);
}

inline Vector some_of(const REAL* from, int64_t count) {
    return count == LANES ? lanes_at(from) : first_of(from, count);
}

inline void put(REAL* to, const Vector& lanes, int64_t count) {
    std::memcpy(to, &lanes, count * sizeof(REAL));
}

// Numbers in order, a vector at a time, in parts that threads share.
template <typename Work>
inline void for_numbers(int64_t num_numbers, const Work& work) {
    constexpr int64_t part = 1024;
    const int64_t num_parts = (num_numbers + part - 1) / part;
    for_each(num_parts, num_numbers > LEAST_FOR_THREADS, [&](int64_t index) {
        const int64_t start = index * part;
        const int64_t length = num_numbers - start < part ? num_numbers - start : part;
        for_vectors(length, [&](int64_t i, int64_t count) { work(start + i, count); });
    });
}

// A number times its logistic function, by an exponential that does not overflow.
inline Vector silu(const Vector& numbers) {
    const Vector shrunk = exponential(numbers < 0 ? numbers : -numbers);
    return numbers * (numbers < 0 ? shrunk : Vector{} + 1) / (1 + shrunk);
}

}  // namespace

// Rows over the root of their mean square, times a weight for each column.
extern "C" void norm(
    const REAL* rows,
    const REAL* weight,
    REAL* outputs,
    int64_t num_rows,
    int64_t num_columns,
    double epsilon) {
    for_each(num_rows, num_rows * num_columns > LEAST_FOR_THREADS, [&](int64_t row) {
        const REAL* from = rows + row * num_columns;
        REAL* to = outputs + row * num_columns;
        Vector squares = {};
        for_vectors(num_columns, [&](int64_t i, int64_t count) {
            const Vector some = some_of(from + i, count);
            squares += some * some;
        });
        const REAL scale = 1 / std::sqrt(sum_of(squares) / num_columns + REAL(epsilon));
        for_vectors(num_columns, [&](int64_t i, int64_t count) {
            const Vector normed = some_of(from + i, count) * scale;
            put(to + i, normed * some_of(weight + i, count), count);
        });
    });
}

// Heads turned by each row's position: a number in the first half of a head and its like in the
// second are one point of a plane.
extern "C" void rotate(
    const REAL* heads,
    int64_t row_stride,
    int64_t head_stride,
    const REAL* cosines,
    const REAL* sines,
    REAL* outputs,
    int64_t num_rows,
    int64_t num_heads,
    int64_t size) {
    const int64_t half = size / 2;
    for_each(num_rows, num_rows * num_heads * size > LEAST_FOR_THREADS, [&](int64_t row) {
        const REAL *cosine = cosines + row * size, *sine = sines + row * size;
        for (int64_t head = 0; head < num_heads; head++) {
            const REAL* from = heads + row * row_stride + head * head_stride;
            REAL* to = outputs + (row * num_heads + head) * size;
            for_vectors(half, [&](int64_t i, int64_t count) {
                const auto at = [&](const REAL* start) { return some_of(start + i, count); };
                const Vector first = at(from), second = at(from + half);
                put(to + i, first * at(cosine) - second * at(sine), count);
                put(to + half + i, second * at(cosine + half) + first * at(sine + half), count);
            });
        }
    });
}

// Gates, through the silu function, times what they let through.
extern "C" void gate(const REAL* gates, const REAL* values, REAL* outputs, int64_t num_numbers) {
    for_numbers(num_numbers, [&](int64_t i, int64_t count) {
        put(outputs + i, silu(some_of(gates + i, count)) * some_of(values + i, count), count);
    });
}

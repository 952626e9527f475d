// A list of operators on a few rows, run one after another by one call.
//
// Stands below multiply.cpp and pointwise.cpp. Given is REAL, float or double. The enum and the
// structs are those of program.py.

namespace {

enum Kind : int64_t { PRODUCT, NORM, ROTATION, GATE, SUM, SCALING, NARROWING, ATTENTION };

// Where numbers are: a place among the tensors; or, below zero, -1 - n: behind n numbers of the
// workspace for each row. What is not there is NOWHERE.
typedef int64_t Place;
constexpr Place NOWHERE = std::numeric_limits<int64_t>::min();

struct Operator {
    int64_t kind;
    Place given[3], output;
    // Of one row; see `run_operator`.
    int64_t sizes[4];
    double number;
};

// See attend.cpp, of which every form of attention has a library of its own.
typedef void Attend(
    const REAL*, int64_t, int64_t, int64_t,
    const REAL*, int64_t, int64_t, int64_t,
    const REAL*, int64_t, int64_t, int64_t,
    REAL*, REAL*, REAL*,
    const int64_t*, int64_t, int64_t, const int64_t*, const int64_t*, int64_t,
    double, double, int64_t, const REAL*);

struct Attention {
    Attend* attend;
    REAL *keys, *values;
    const REAL* sinks;
    int64_t num_heads, num_key_heads, key_size, value_size, window;
    double scale, softcap;
};

// Where the rows' keys are.
struct Rows {
    const int64_t* table;
    int64_t table_width, block_size;
    const int64_t *slots, *lengths;
};

struct Memory {
    REAL* const* tensors;
    REAL* workspace;
    int64_t num_rows;

    REAL* at(Place place) const {
        if (place == NOWHERE) return nullptr;
        return place >= 0 ? tensors[place] : workspace + (-1 - place) * num_rows;
    }
};

// Some of each block's numbers, block by block.
inline void narrow(
    const REAL* from, REAL* to, int64_t num_blocks, int64_t block, int64_t start, int64_t length) {
    for (int64_t i = 0; i < num_blocks; i++)
        std::memcpy(to + i * length, from + i * block + start, length * sizeof(REAL));
}

inline void attend(
    const Attention& form,
    const Rows& rows,
    int64_t num_rows,
    const REAL* queries,
    const REAL* keys,
    const REAL* values,
    REAL* outputs) {
    const int64_t key = form.key_size, value = form.value_size;
    form.attend(
        queries, form.num_heads * key, key, 1,
        keys, form.num_key_heads * key, key, 1,
        values, form.num_key_heads * value, value, 1,
        outputs, form.keys, form.values,
        rows.table, rows.table_width, rows.block_size, rows.slots, rows.lengths, num_rows,
        form.scale, form.softcap, form.window, form.sinks);
}

inline void run_operator(
    const Operator& op, const Memory& memory, const Attention* attentions, const Rows* rows) {
    const REAL *first = memory.at(op.given[0]), *second = memory.at(op.given[1]);
    const REAL* third = memory.at(op.given[2]);
    REAL* outputs = memory.at(op.output);
    const int64_t *sizes = op.sizes, num_rows = memory.num_rows;
    const REAL number = op.number;
    switch (op.kind) {
        case PRODUCT:  // of `sizes[0]` inputs, with `sizes[1]` outputs
            multiply(first, second, third, outputs, num_rows, sizes[0], sizes[1]);
            break;
        case NORM:  // of `sizes[0]` heads of `sizes[1]`
            norm(first, second, outputs, num_rows * sizes[0], sizes[1], op.number);
            break;
        case ROTATION: {  // of `sizes[0]` heads of `sizes[1]`
            const int64_t heads = sizes[0], size = sizes[1];
            rotate(first, heads * size, size, second, third, outputs, num_rows, heads, size);
            break;
        }
        case GATE:  // of `sizes[0]` numbers, as the next two
            gate(first, second, outputs, num_rows * sizes[0]);
            break;
        case SUM:
            for_numbers(num_rows * sizes[0], [&](int64_t i, int64_t count) {
                put(outputs + i, some_of(first + i, count) + some_of(second + i, count), count);
            });
            break;
        case SCALING:
            for_numbers(num_rows * sizes[0], [&](int64_t i, int64_t count) {
                put(outputs + i, some_of(first + i, count) * number, count);
            });
            break;
        case NARROWING:  // of `sizes[0]` blocks of `sizes[1]`: from `sizes[2]` on, `sizes[3]`
            narrow(first, outputs, num_rows * sizes[0], sizes[1], sizes[2], sizes[3]);
            break;
        case ATTENTION:  // the `sizes[0]`-th
            attend(attentions[sizes[0]], *rows, num_rows, first, second, third, outputs);
    }
}

}  // namespace

// The operators from `first` up to `end`; where one attends, attentions and rows are given.
extern "C" void run(
    const Operator* operators,
    int64_t first,
    int64_t end,
    REAL* const* tensors,
    REAL* workspace,
    int64_t num_rows,
    const Attention* attentions,
    const Rows* rows) {
    const Memory memory = {tensors, workspace, num_rows};
    for (int64_t i = first; i < end; i++) run_operator(operators[i], memory, attentions, rows);
}

// The next token of each row, and its log-probability, in one pass over the logits.
//
// The vocabulary is read a chunk at a time: its largest logit, and the sum of its exponentials
// relative to that. A uniform number of SplitMix64 chooses the chunk, then the token in it. The
// results are those of sampling/draw.py.
//
// Tokens that are never sampled are taken out of the logits after that pass, and put back in the end.
//
// Follows vectors.h. The loader defines STORED as float.

#include <vector>

namespace {

constexpr int64_t CHUNK = 256;

// One row's logits over its temperature.
struct Row {
    float* logits;
    int64_t count;
    float temperature;

    float at(int64_t token) const { return logits[token] / temperature; }

    // A vector of logits from `token` on; past the end they are minus infinity.
    Vector lanes(int64_t token) const {
        if (token + LANES <= count) return lanes_at(logits + token) / temperature;
        Vector last = Vector{} - INFINITE;
        for (int64_t i = 0; token + i < count; i++) last[i] = at(token + i);
        return last;
    }
};

struct Chunk {
    float largest;
    // Of exponentials relative to the largest logit; NaN if any logit is NaN.
    double sum;
};

Chunk chunk_at(const Row& row, int64_t start) {
    const int64_t end = start + CHUNK < row.count ? start + CHUNK : row.count;
    Vector most = Vector{} - INFINITE;
    for (int64_t token = start; token < end; token += LANES) {
        const Vector some = row.lanes(token);
        most = some > most ? some : most;
    }
    const float largest = largest_of(most);
    // In a chunk of minus infinities the difference to the largest would be NaN.
    const float base = largest == -INFINITE ? 0 : largest;
    typedef float Four __attribute__((vector_size(16), may_alias));
    typedef double Doubles __attribute__((vector_size(32)));
    Doubles sums = {};
    for (int64_t token = start; token < end; token += LANES) {
        const Vector weights = exponential(row.lanes(token) - base);
        const Four* fours = reinterpret_cast<const Four*>(&weights);
        for (int64_t i = 0; i < LANES / 4; i++)
            sums += __builtin_convertvector(fours[i], Doubles);
    }
    return {largest, (sums[0] + sums[1]) + (sums[2] + sums[3])};
}

// The whole distribution of some chunks: its largest logit, and the sum relative to that.
Chunk joined(const std::vector<Chunk>& chunks) {
    float largest = -INFINITE;
    for (const Chunk& chunk : chunks) largest = chunk.largest > largest ? chunk.largest : largest;
    double total = 0;
    for (const Chunk& chunk : chunks)
        if (chunk.sum != 0) total += chunk.sum * std::exp(double(chunk.largest) - largest);
    return {largest, total};
}

float normalizer(const Chunk& whole) { return float(std::log(whole.sum)) + whole.largest; }

double uniform(uint64_t seed, uint64_t index) {
    uint64_t z = seed + (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z = z ^ (z >> 31);
    return double(z >> 11) * (1. / (int64_t(1) << 53));
}

// Return the first of the intervals laid end to end that ends after a point, and make the point
// relative to its start. If rounding leads past the end, return the last nonempty interval.
template <typename Length>
int64_t find(int64_t count, double& point, Length length) {
    int64_t last = 0;
    double before = 0, start = 0;
    for (int64_t index = 0; index < count; index++) {
        const double next = before + length(index);
        if (next > before) last = index, start = before;
        if (next > point) break;
        before = next;
    }
    point -= start;
    return last;
}

int64_t drawn(const Row& row, const std::vector<Chunk>& chunks, float largest, double point) {
    const auto share = [&](int64_t index) {
        const Chunk& chunk = chunks[index];
        return chunk.sum == 0 ? 0 : chunk.sum * std::exp(double(chunk.largest) - largest);
    };
    const int64_t index = find(int64_t(chunks.size()), point, share);
    point /= std::exp(double(chunks[index].largest) - largest);
    alignas(VECTOR_BYTES) float weights[CHUNK];
    const int64_t start = index * CHUNK;
    const int64_t count = row.count - start < CHUNK ? row.count - start : CHUNK;
    for (int64_t i = 0; i < count; i += LANES) {
        const Vector some = exponential(row.lanes(start + i) - chunks[index].largest);
        std::memcpy(weights + i, &some, sizeof(some));
    }
    return start + find(count, point, [&](int64_t i) { return double(weights[i]); });
}

int64_t most_likely(const Row& row, const std::vector<Chunk>& chunks, float largest) {
    for (int64_t index = 0; index < int64_t(chunks.size()); index++)
        if (chunks[index].largest == largest)
            for (int64_t token = index * CHUNK; token < row.count; token++)
                if (row.at(token) == largest) return token;
    return 0;
}

}  // namespace

// A temperature of 0 takes the most likely token, and counts as 1 for its log-probability.
// A row whose logits make no distribution gets NaN as its log-probability. It is taken from all
// tokens, or if `is_processed` from those that can be sampled.
extern "C" void sample(
    float* logits,
    int64_t num_rows,
    int64_t vocab_size,
    const int64_t* never_sampled,
    int64_t num_never_sampled,
    int64_t is_processed,
    const float* temperatures,
    const int64_t* seeds,
    const int64_t* indices,
    int64_t* token_ids,
    float* logprobs) {
    for_each(num_rows, num_rows * vocab_size > LEAST_FOR_THREADS, [&](int64_t i) {
        const bool is_greedy = temperatures[i] == 0;
        const Row row = {logits + i * vocab_size, vocab_size, is_greedy ? 1 : temperatures[i]};
        std::vector<Chunk> chunks;
        for (int64_t start = 0; start < vocab_size; start += CHUNK)
            chunks.push_back(chunk_at(row, start));
        Chunk whole = joined(chunks);
        float reported = normalizer(whole);
        token_ids[i] = 0;
        logprobs[i] = std::numeric_limits<float>::quiet_NaN();
        if (!std::isfinite(reported)) return;
        std::vector<float> taken_out;
        for (int64_t n = 0; n < num_never_sampled; n++) {
            taken_out.push_back(row.logits[never_sampled[n]]);
            row.logits[never_sampled[n]] = -INFINITE;
        }
        for (int64_t n = 0; n < num_never_sampled; n++) {
            const int64_t index = never_sampled[n] / CHUNK;
            chunks[index] = chunk_at(row, index * CHUNK);
        }
        if (num_never_sampled) whole = joined(chunks);
        if (is_processed) reported = normalizer(whole);
        if (whole.sum > 0) {
            token_ids[i] = is_greedy
                ? most_likely(row, chunks, whole.largest)
                : drawn(row, chunks, whole.largest, uniform(seeds[i], indices[i]) * whole.sum);
            logprobs[i] = row.at(token_ids[i]) - reported;
        }
        for (int64_t n = 0; n < num_never_sampled; n++)
            row.logits[never_sampled[n]] = taken_out[n];
    });
}

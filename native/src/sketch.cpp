#include "sketch.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "layout.h"
#include "loops.h"
#include "parallel.h"
#include "raw.h"

namespace wingbeat {

namespace {

constexpr std::size_t least_slice = std::size_t{1} << 20;
constexpr std::size_t least_look_up = std::size_t{1} << 18;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// calloc's pages cost nothing until they are used, and most of the tables never are.
template <class T>
std::unique_ptr<T, Free> zeroed() {
  void* memory = std::calloc(1, sizeof(T));
  if (memory == nullptr) throw std::bad_alloc();
  return std::unique_ptr<T, Free>(static_cast<T*>(memory));
}

Scratch& scratch_of_thread() {
  thread_local const std::unique_ptr<Scratch, Free> scratch = zeroed<Scratch>();
  return *scratch;
}

struct Counts {
  std::array<std::uint32_t, key_count> even;
  std::array<std::uint32_t, key_count> odd;
};

void add_counts(const Counts& from, Scratch& to) {
  for (std::size_t key = 0; key < key_count; ++key) {
    to.even[key] += from.even[key];
    to.odd[key] += from.odd[key];
  }
}

void count(const float* x, const float* residual, std::size_t n, unsigned threads,
           Scratch& scratch) {
  const auto cut = slices(n, threads, least_slice);
  std::vector<std::unique_ptr<Counts, Free>> counts;
  for (std::size_t i = 1; i < cut.size(); ++i) counts.push_back(zeroed<Counts>());
  parallel(cut.size(), threads, [&](std::size_t i) {
    const std::size_t at = cut[i].begin;
    auto& even = i == 0 ? scratch.even : counts[i - 1]->even;
    auto& odd = i == 0 ? scratch.odd : counts[i - 1]->odd;
    loops().count_keys(x + at, residual == nullptr ? nullptr : residual + at, cut[i].size(),
                       even.data(), n <= one_table_most ? even.data() : odd.data());
  });
  for (const auto& other : counts) add_counts(*other, scratch);
}

}  // namespace

void sketch_encode(const float* x, std::size_t n, std::uint8_t* payload, int bits, Split split,
                   Level level, float* residual, unsigned threads) {
  if (sketch_is_raw(n, bits)) {
    raw_encode(x, n, payload, residual);
    return;
  }
  Scratch& scratch = scratch_of_thread();
  count(x, residual, n, threads, scratch);
  const Codebook book = make_codebook(scratch, n, bits, split, level);
  std::memcpy(payload, book.table.data(), table_bytes(bits));
  std::uint8_t* codes = payload + table_bytes(bits);
  const auto cut = slices(n, threads, least_look_up);
  parallel(cut.size(), threads, [&](std::size_t i) {
    const std::size_t at = cut[i].begin;
    loops().write_codes(x + at, residual == nullptr ? nullptr : residual + at, cut[i].size(),
                        scratch.lut.data(), book.table.data(), bits,
                        codes + code_bytes(at, bits));
  });
}

void sketch_decode(const std::uint8_t* payload, std::size_t n, float* out, int bits, bool add,
                   unsigned threads) {
  if (sketch_is_raw(n, bits)) {
    raw_decode(payload, n, out, add);
    return;
  }
  std::array<float, 256> table{};
  std::memcpy(table.data(), payload, table_bytes(bits));
  const std::uint8_t* codes = payload + table_bytes(bits);
  const auto cut = slices(n, threads, least_look_up);
  parallel(cut.size(), threads, [&](std::size_t i) {
    const std::size_t at = cut[i].begin;
    loops().read_codes(codes + code_bytes(at, bits), cut[i].size(), table.data(), bits, add,
                       out + at);
  });
}

}  // namespace wingbeat

// Runs the core on everything awkward and compares with what is naive. Meant for sanitizers: each
// buffer has exactly its size, so that a step too far is seen. Exit code 1 and a line for the
// first difference.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "carriers.h"
#include "checks.h"
#include "ciphers.h"
#include "frames.h"
#include "halves.h"
#include "inputs.h"
#include "layout.h"
#include "loops.h"
#include "merges.h"
#include "naive.h"
#include "nets.h"
#include "resumes.h"
#include "rings.h"
#include "sketch.h"
#include "topk.h"

namespace {

using naive::Bytes;
using naive::Floats;
using naive::kinds;
using naive::make;
using wingbeat::Level;
using wingbeat::Split;

std::string current;

void expect(bool holds, const char* what) {
  ++checks::count;
  if (holds) return;
  std::fprintf(stderr, "driver: %s: not so: %s\n", current.c_str(), what);
  std::exit(1);
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), 4 * a.size()) == 0);
}

// NaN is NaN, whatever its payload.
bool same_values(const Floats& a, const Floats& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])))) return false;
  }
  return true;
}

Floats plus(const Floats& a, const Floats& b) {
  Floats out(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) out[i] = a[i] + b[i];
  return out;
}

// Relative squared error over the finite elements, in doubles.
double error_of(const Floats& truth, const Floats& arrived) {
  double lost = 0;
  double all = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    if (!std::isfinite(truth[i])) continue;
    const double difference = double{truth[i]} - double{arrived[i]};
    lost += difference * difference;
    all += double{truth[i]} * double{truth[i]};
  }
  return all > 0 ? lost / all : 0;
}

void check_residual(const Floats& acc, const Floats& arrived, const Floats& residual) {
  for (std::size_t i = 0; i < acc.size(); ++i) {
    const float lost = acc[i] - arrived[i];
    expect(residual[i] == (std::isfinite(lost) ? lost : 0.0F), "residual = acc - decoded, or 0");
  }
}

void check_sketch_decode(const Bytes& payload, const Floats& arrived, int bits) {
  const std::size_t n = arrived.size();
  for (const unsigned threads : {1U, 3U}) {
    Floats out(n, 7.0F);
    wingbeat::sketch_decode(payload.data(), n, out.data(), bits, false, threads);
    expect(same_values(out, arrived), "decode reads what a bit by bit decoder reads");
    out.assign(n, 0.5F);
    wingbeat::sketch_decode(payload.data(), n, out.data(), bits, true, threads);
    expect(same_values(out, plus(Floats(n, 0.5F), arrived)), "decode adds");
  }
}

struct Sketched {
  Bytes payload;
  Floats residual;
};

Sketched sketch(const Floats& x, const Floats* residual, int bits, Split split, Level level,
                unsigned threads) {
  Sketched out{Bytes(wingbeat::sketch_bytes(x.size(), bits), 0xa5), residual ? *residual : Floats()};
  const Floats before = x;
  wingbeat::sketch_encode(x.data(), x.size(), out.payload.data(), bits, split, level,
                          residual ? out.residual.data() : nullptr, threads);
  expect(same_bits(x, before), "x is as it was");
  return out;
}

void check_sketch(const Floats& x, const Floats& residual, int bits, Split split, Level level) {
  const std::size_t n = x.size();
  const Floats acc = plus(x, residual);
  const Sketched one = sketch(x, &residual, bits, split, level, 1);
  const Sketched plain = sketch(acc, nullptr, bits, split, level, 3);
  const Sketched three = sketch(x, &residual, bits, split, level, 3);
  expect(one.payload == plain.payload, "with a residual: the payload of x + residual");
  expect(one.payload == three.payload, "the payload does not depend on threads");
  expect(same_bits(one.residual, three.residual), "the residual does not depend on threads");
  wingbeat::prefer_portable(true);
  const Sketched portable = sketch(x, &residual, bits, split, level, 1);
  wingbeat::prefer_portable(false);
  expect(one.payload == portable.payload, "all instruction sets write the same");
  expect(same_bits(one.residual, portable.residual), "all instruction sets lose the same");

  const Floats arrived = naive::read_sketch(one.payload, n, bits);
  check_sketch_decode(one.payload, arrived, bits);
  check_residual(acc, arrived, one.residual);
  if (wingbeat::sketch_is_raw(n, bits)) {
    expect(same_values(arrived, acc), "a raw payload loses nothing");
    return;
  }
  const Floats wanted = naive::through_sketch(acc, bits, split, level);
  for (std::size_t i = 0; i < n; ++i) {
    expect(std::isnan(arrived[i]) == !std::isfinite(acc[i]), "NaN where acc is not finite");
    expect((arrived[i] == 0) == (wanted[i] == 0), "zeros where the naive sketch has them");
  }
  const double limit = error_of(acc, wanted);
  expect(error_of(acc, arrived) <= limit * 1.01 + 1e-12, "the error of the naive sketch");
  expect(error_of(acc, arrived) >= limit * 0.99 - 1e-12, "the error of the naive sketch");
}

void check_sketches(std::size_t n, bool all) {
  for (const char* kind : kinds) {
    const Floats x = make(kind, n, 1);
    const Floats residual = make("heavy", n, 2);
    for (int bits = 1; bits <= 8; ++bits) {
      if (!all && bits != 1 && bits != 3 && bits != 8) continue;
      for (const Split split : {Split::error, Split::count}) {
        for (const Level level : {Level::mean, Level::ends}) {
          if (!all && split == Split::count && level == Level::mean) continue;
          current = std::string("sketch of ") + kind + ", n " + std::to_string(n) + ", bits " +
                    std::to_string(bits) + (split == Split::error ? ", error" : ", count") +
                    (level == Level::mean ? ", mean" : ", ends");
          check_sketch(x, bits % 2 ? residual : Floats(n), bits, split, level);
        }
      }
    }
  }
}

struct Sent {
  Bytes payload;
  Floats residual;
  Floats velocity;
};

Sent topk(const Floats& x, std::size_t k, const Floats* residual, const Floats* velocity,
          float momentum, unsigned threads) {
  Sent out{Bytes(wingbeat::topk_bytes(x.size(), k), 0xa5), residual ? *residual : Floats(),
           velocity ? *velocity : Floats()};
  const Floats before = x;
  wingbeat::topk_encode(x.data(), x.size(), out.payload.data(), k,
                        residual ? out.residual.data() : nullptr,
                        velocity ? out.velocity.data() : nullptr, momentum, threads);
  expect(same_bits(x, before), "x is as it was");
  return out;
}

void check_left(const Sent& sent, const Floats& acc, const Floats& velocity, std::size_t k) {
  const std::size_t n = acc.size();
  // Mark what was sent: decode ones in place of the values.
  Bytes marked = sent.payload;
  const float one = 1.0F;
  const std::size_t values = wingbeat::topk_is_raw(n, k) ? n : k;
  for (std::size_t i = 0; i < values; ++i) std::memcpy(&marked[4 * i], &one, 4);
  const Floats chosen = naive::read_topk(marked, n, k);
  for (std::size_t i = 0; i < n; ++i) {
    const bool gone = chosen[i] == 1.0F;
    expect(sent.residual[i] == (gone || !std::isfinite(acc[i]) ? 0.0F : acc[i]),
           "the residual keeps what was not sent and is finite");
    if (sent.velocity.empty()) continue;
    expect(sent.velocity[i] == (gone || !std::isfinite(velocity[i]) ? 0.0F : velocity[i]),
           "the velocity keeps what was not sent and is finite");
  }
}

void check_topk_decode(const Bytes& payload, std::size_t n, std::size_t k) {
  const Floats arrived = naive::read_topk(payload, n, k);
  for (const unsigned threads : {1U, 3U}) {
    Floats out(n, 7.0F);
    auto done = wingbeat::topk_decode(payload.data(), n, out.data(), k, false, threads);
    expect(done == wingbeat::Decoded::well, "its own payload is well formed");
    expect(same_values(out, arrived), "decode reads what the naive one reads");
    out.assign(n, 0.5F);
    wingbeat::topk_decode(payload.data(), n, out.data(), k, true, threads);
    expect(same_values(out, plus(Floats(n, 0.5F), arrived)), "decode adds");
  }
}

void check_topk(const Floats& x, const Floats& residual, const Floats& velocity, std::size_t k) {
  const std::size_t n = x.size();
  const float momentum = 0.9F;
  const Bytes plain = naive::write_topk(x, k);
  expect(topk(x, k, nullptr, nullptr, 0, 1).payload == plain, "the naive payload");
  expect(topk(x, k, nullptr, nullptr, 0, 3).payload == plain, "the naive payload, 3 threads");
  check_topk_decode(plain, n, k);

  Floats moved(n);
  for (std::size_t i = 0; i < n; ++i) {
    const float faster = momentum * velocity[i];
    moved[i] = faster + x[i];
  }
  for (const bool with_velocity : {false, true}) {
    const Floats acc = plus(residual, with_velocity ? moved : x);
    const Bytes wanted = naive::write_topk(acc, k);
    for (const int way : {0, 1, 2}) {
      wingbeat::prefer_portable(way == 1);
      const Sent sent =
          topk(x, k, &residual, with_velocity ? &velocity : nullptr, momentum, way == 2 ? 3 : 1);
      wingbeat::prefer_portable(false);
      expect(sent.payload == wanted, "the naive payload of x and residual");
      check_left(sent, acc, moved, k);
    }
  }
}

void check_topks(std::size_t n, bool all) {
  std::vector<std::size_t> counts{1, n / 1000, n / 100, n / 2, 2 * n / 3, n};
  if (!all) counts = {1, n / 1000, n / 10};
  for (const char* kind : kinds) {
    const Floats x = make(kind, n, 3);
    const bool quiet = std::string(kind) == "constant" || std::string(kind) == "zeros";
    const Floats residual = quiet ? Floats(n) : make("normal", n, 4);
    const Floats velocity = quiet ? Floats(n) : make("heavy", n, 5);
    for (std::size_t k : counts) {
      k = n == 0 ? 0 : std::clamp<std::size_t>(k, 1, n);
      current = std::string("top ") + std::to_string(k) + " of " + std::to_string(n) + " " + kind;
      check_topk(x, residual, velocity, k);
    }
  }
}

// Large values where the sample does not look, and no large ones where it does: the guess fails.
void check_wrong_guesses() {
  const std::size_t n = 300'007;
  for (const std::size_t k : {std::size_t{30}, std::size_t{3000}}) {
    for (const std::size_t large : {k / 4, 20 * k, std::size_t{100'000}}) {
      current = "top " + std::to_string(k) + ", " + std::to_string(large) + " large together";
      Floats x = make("normal", n, 6);
      for (std::size_t i = 0; i < large; ++i) x[n - 1 - i] = 1e6F + static_cast<float>(i % 100);
      x[5] = std::numeric_limits<float>::infinity();
      check_topk(x, Floats(n), Floats(n), k);
      for (std::size_t i = 0; i < n; i += 2) x[i] = std::numeric_limits<float>::quiet_NaN();
      check_topk(x, Floats(n), Floats(n), k);
    }
  }
}

// Large values only where the sample does look: it takes them for common.
void check_misled_samples() {
  const std::size_t n = 300'007;
  const std::size_t k = 3000;
  const std::size_t samples = wingbeat::sample_size(n);
  for (const std::size_t large : {std::size_t{100}, std::size_t{2999}}) {
    current = "top 3000, " + std::to_string(large) + " large where the sample looks";
    Floats x = make("normal", n, 11);
    for (std::size_t i = 0; i < large; ++i) x[wingbeat::sample_place(i, n / samples)] = -1e6F;
    check_topk(x, Floats(n), Floats(n), k);
  }
}

void refused(const Bytes& payload, std::size_t n, std::size_t k, wingbeat::Decoded why) {
  Floats out(n, 7.0F);
  const auto done = wingbeat::topk_decode(payload.data(), n, out.data(), k, false, 2);
  expect(done == why, "the malformed payload is refused for its reason");
  expect(same_bits(out, Floats(n, 7.0F)), "out is not touched");
}

// Whatever arrives: refused, or read as the naive decoder reads it.
void check_garbage(const Bytes& good, std::size_t n, std::size_t k) {
  current = "malformed: bytes changed at random";
  std::mt19937 random(8);
  for (int i = 0; i < 2000; ++i) {
    Bytes bad = good;
    for (int change = 0; change < 3; ++change) {
      bad[4 * k + random() % (bad.size() - 4 * k)] = static_cast<std::uint8_t>(random() % 4);
    }
    Floats out(n, 7.0F);
    const auto done = wingbeat::topk_decode(bad.data(), n, out.data(), k, false, 1);
    const bool well = done == wingbeat::Decoded::well;
    expect(same_values(out, well ? naive::read_topk(bad, n, k) : Floats(n, 7.0F)),
           "read well, or refused and not touched");
  }
}

void check_malformed() {
  using wingbeat::Decoded;
  const std::size_t n = 65536 + 100;
  const std::size_t k = 10;
  const Bytes good = naive::write_topk(make("normal", n, 7), k);
  const std::size_t counts = 4 * k;
  const std::size_t offsets = counts + 8;
  current = "malformed: counts too large";
  Bytes bad = good;
  std::memset(&bad[counts], 0xff, 8);
  refused(bad, n, k, Decoded::wrong_counts);
  current = "malformed: counts too small";
  std::memset(&bad[counts], 0, 8);
  refused(bad, n, k, Decoded::wrong_counts);
  current = "malformed: counts whose sum overflows 32 bits";
  const std::uint32_t wrapped[] = {0xffffffff, 11};
  std::memcpy(&bad[counts], wrapped, 8);
  refused(bad, n, k, Decoded::wrong_counts);
  current = "malformed: an index twice";
  bad = good;
  const std::uint32_t all_first[] = {10, 0};
  std::memcpy(&bad[counts], all_first, 8);
  std::memset(&bad[offsets], 0, 2 * k);
  refused(bad, n, k, Decoded::not_ascending);
  current = "malformed: beyond the end";
  const std::uint32_t all_last[] = {0, 10};
  std::memcpy(&bad[counts], all_last, 8);
  for (std::uint16_t i = 0; i < k; ++i) wingbeat::store(&bad[offsets + 2 * i], std::uint16_t(91 + i));
  refused(bad, n, k, Decoded::beyond_the_end);
  check_garbage(good, n, k);
}

// Large enough that several threads do have work, which the naive kernels are too slow for.
void check_threads() {
  const std::size_t n = (std::size_t{5} << 20) / 2 + 13;
  const Floats x = make("heavy", n, 9);
  const Floats residual = make("normal", n, 10);
  for (const int bits : {3, 8}) {
    current = "large sketch, bits " + std::to_string(bits);
    const Sketched one = sketch(x, &residual, bits, Split::error, Level::mean, 1);
    const Sketched four = sketch(x, &residual, bits, Split::error, Level::mean, 4);
    expect(one.payload == four.payload, "the payload does not depend on threads");
    expect(same_bits(one.residual, four.residual), "the residual does not depend on threads");
    const Floats arrived = naive::read_sketch(one.payload, n, bits);
    check_sketch_decode(one.payload, arrived, bits);
    check_residual(plus(x, residual), arrived, one.residual);
  }
  for (const std::size_t k : {n / 1000, n / 50}) {
    current = "large top " + std::to_string(k);
    const Floats acc = plus(residual, x);
    const Bytes wanted = naive::write_topk(acc, k);
    for (const unsigned threads : {1U, 4U}) {
      const Sent sent = topk(x, k, &residual, nullptr, 0, threads);
      expect(sent.payload == wanted, "the naive payload");
      check_left(sent, acc, acc, k);
    }
    check_topk_decode(wanted, n, k);
  }
}

// Cases that are numbered, each of which says what is wrong with it.
void check_numbered(const char* what, unsigned count, std::string (*wrong_with)(unsigned)) {
  for (unsigned number = 0; number < count; ++number) {
    current = what + std::to_string(number);
    const std::string wrong = wrong_with(number);
    expect(wrong.empty(), wrong.c_str());
  }
}

}  // namespace

int main() {
  for (const std::size_t n : {0UL, 1UL, 2UL, 7UL, 63UL, 64UL, 65UL, 341UL, 342UL, 1000UL, 4097UL}) {
    check_sketches(n, true);
    check_topks(n, true);
  }
  for (const std::size_t n : {65535UL, 65536UL, 65537UL}) check_topks(n, false);
  check_sketches(65537, false);
  check_wrong_guesses();
  check_misled_samples();
  check_malformed();
  check_threads();
  check_numbered("merge of instance ", 3000, naive::wrong_merge);
  check_numbered("half of seed ", 4000, naive::wrong_half);
  check_numbered("header of seed ", 3000, naive::wrong_header);
  check_numbered("flow of seed ", 300, naive::wrong_flow);
  current = "net";
  try {
    ciphers::check();
    rings::check();
    nets::check();
    resumes::check();
    current = "carriers";
    carriers::check();
  } catch (const std::exception& error) {
    expect(false, error.what());
  }
  std::printf("driver: %ld checks passed with %s\n", checks::count.load(), wingbeat::loops().name);
  return 0;
}

// Codecs of the regions of a buffer, as wingbeat/codecs/coding.py has them: the same payloads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../codebook.h"
#include "lane.h"

namespace wingbeat::net {

enum class Codec : std::uint8_t { dense, half, sketch, topk };

// Bits of a value of top-k that is not sketched.
inline constexpr int whole_bits = 32;

// Elements [start, stop) of the buffer, which have one codec.
struct Region {
  std::uint64_t start = 0;
  std::uint64_t stop = 0;
  Codec codec = Codec::dense;
  bool feedback = false;  // whether the residual keeps the encoding error
  int bits = 8;           // of each value of a sketch or of top-k
  Split split = Split::error;
  Level level = Level::mean;
  double density = 1.0;  // of top-k

  std::uint64_t bytes(std::uint64_t elements) const;
  // Whether the values of top-k are sketched.
  bool sketches_values(std::uint64_t elements) const;
};

// The regions are disjoint and ascend.
struct Coding : std::enable_shared_from_this<Coding> {
  std::vector<Region> regions;
};

// Encodes each chunk of a float32 buffer by itself. `residual`, of the buffer's length, may be null.
class EncodedPacking : public Packing {
 public:
  EncodedPacking(std::shared_ptr<const Coding> coding, float* residual, unsigned threads)
      : coding_(std::move(coding)), residual_(residual), threads_(threads) {}
  std::uint64_t bytes(std::uint64_t start, std::uint64_t stop) const override;
  void pack(std::uint8_t* buffer, std::uint64_t start, std::uint64_t stop, std::uint8_t* out,
            bool result) const override;
  const char* unpack(const std::uint8_t* chunk, std::uint8_t* buffer, std::uint64_t start,
                     std::uint64_t stop, bool add) const override;
  bool slow() const override { return true; }

 private:
  template <class Visit>
  void visit(std::uint64_t start, std::uint64_t stop, Visit visit) const;
  void encode(const Region& part, const float* x, std::uint8_t* out) const;
  const char* decode(const Region& part, const std::uint8_t* payload, float* out, bool add) const;

  const std::shared_ptr<const Coding> coding_;
  float* const residual_;
  const unsigned threads_;
};

}  // namespace wingbeat::net

#include "resumable.h"

#include <tuple>

namespace wingbeat::net {

namespace {

auto identity(const FrameHeader& of) {
  return std::tie(of.kind, of.channel, of.tag, of.length, of.offset, of.total, of.group);
}

}  // namespace

ReceivedFrames::Begin ReceivedFrames::begin(const FrameHeader& header) {
  if (cut_) {
    if (identity(header) != identity(header_)) return Begin::wrong;
    cut_ = false;
    return Begin::again;
  }
  begun_ = true;
  header_ = header;
  return Begin::fresh;
}

void ReceivedFrames::end() {
  begun_ = false;
  ++count_;
  bytes_ += header_.length;
}

std::uint64_t ReceivedFrames::announce() {
  bytes_ = 0;
  return announced_ = count_;
}

}  // namespace wingbeat::net

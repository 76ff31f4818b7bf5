#include "net.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "ending.h"
#include "net/codec_clock.h"
#include "net/coding.h"
#include "net/lane.h"
#include "net/nic.h"
#include "net/ring.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace wingbeat::net;
using wingbeat::Level;
using wingbeat::Split;
using wingbeat::Unlocked;

std::uint8_t* at(std::uintptr_t address) { return reinterpret_cast<std::uint8_t*>(address); }

// One message, and the thread that waits for it.
class Pending : public Owner {
 public:
  void progress(Work&) override {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

  bool wait(const Operation& operation, double seconds) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
      return operation.state.load(std::memory_order_acquire) != State::pending;
    });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

// A message as Python holds it, with the object whose memory it uses.
struct Message {
  std::shared_ptr<Group> link;
  std::shared_ptr<Pending> pending;
  OperationPtr operation;
  nb::object memory;

  Message(std::shared_ptr<Group> of, nb::object holder)
      : link(std::move(of)),
        pending(std::make_shared<Pending>()),
        operation(std::make_shared<Operation>()),
        memory(std::move(holder)) {
    operation->owner = pending;
  }
  Message(Message&&) = default;
  Message& operator=(Message&&) = delete;

  ~Message() {
    if (operation == nullptr) return;
    if (operation->state.load(std::memory_order_acquire) == State::pending) {
      Work work;
      link->cancel(pending.get(), work);
      work.run();
    }
  }

  void wait(double seconds) {
    bool ended = false;
    {
      const Unlocked unlocked;
      ended = pending->wait(*operation, seconds);
    }
    if (!ended) {
      throw std::runtime_error("Timed out: nothing arrived for " + std::to_string(seconds) + " s");
    }
    if (operation->state.load() == State::failed) throw std::runtime_error(operation->error);
  }
};

Message post(const std::shared_ptr<Group>& link, nb::object memory, std::uintptr_t address,
             std::uint64_t bytes, int peer, std::uint16_t channel, std::uint32_t tag, bool send) {
  Message message(link, std::move(memory));
  Operation& operation = *message.operation;
  operation.data = at(address);
  operation.bytes = bytes;
  operation.peer = peer;
  operation.channel = channel;
  operation.tag = tag;
  const Unlocked unlocked;
  Work work;
  if (send) {
    link->send(message.operation, work);
  } else {
    link->receive(message.operation, work);
  }
  work.run();
  return message;
}

std::vector<Transfer> transfers(nb::handle from) {
  std::vector<Transfer> out;
  for (const nb::handle each : from) {
    const auto fields = nb::cast<nb::tuple>(each);
    out.push_back({nb::cast<int>(fields[0]), nb::cast<std::uint64_t>(fields[1]),
                   nb::cast<std::uint64_t>(fields[2]), nb::cast<std::uint32_t>(fields[3]),
                   nb::cast<bool>(fields[4]), nb::cast<int>(fields[5]),
                   nb::cast<bool>(fields[6])});
  }
  return out;
}

std::optional<Keys> keys_of(const nb::bytes& bytes) {
  std::optional<Keys> keys;
  if (bytes.size() == sizeof(Keys)) {
    std::memcpy(&keys.emplace(), bytes.c_str(), sizeof(Keys));
  } else if (bytes.size() > 0) {
    throw std::invalid_argument("a key has 16 bytes");
  }
  return keys;
}

void add(Nic& nic, int peer, int fd, const nb::bytes& bytes, std::shared_ptr<Rings> rings,
         bool resumes) {
  if (rings != nullptr) return nic.add(peer, std::make_unique<RingStream>(fd, std::move(rings)));
  nic.add(peer, std::make_unique<Stream>(fd), keys_of(bytes), resumes);
}

bool resume(Nic& nic, int peer, int fd, const nb::bytes& bytes) {
  auto stream = std::make_unique<Stream>(fd);
  const auto keys = keys_of(bytes);
  const Unlocked unlocked;
  return nic.resume(peer, std::move(stream), keys);
}

nb::object health(Nic& nic, int peer) {
  const auto found = nic.health(peer);
  if (!found) return nb::none();
  const auto& [outstanding, acknowledged, silent] = found->progress;
  return nb::make_tuple(found->lost, outstanding, acknowledged, 1e-3 * silent);
}

void bind_nic(nb::module_& module) {
  nb::class_<Rings>(module, "Rings", "Memory that this process shares with one of the same host.")
      .def(nb::new_([] { return std::make_shared<Rings>(); }))
      .def(nb::new_([](const std::vector<int>& descriptors) {
        return std::make_shared<Rings>(descriptors);
      }))
      .def_prop_ro("descriptors", &Rings::descriptors)
      .def_prop_ro_static("DESCRIPTORS", [](nb::handle) { return rings_descriptors; });
  module.attr("CONNECTION_ENDED") = connection_ended;
  module.def("can_encrypt", &can_encrypt,
             "Returns whether this processor has the instructions that encryption needs.");
  nb::class_<Message>(module, "Message", "A message that is being sent or received.")
      .def("wait", &Message::wait);
  nb::class_<Nic>(module, "Nic",
                  "The connections over one network interface, and the thread that serves them.")
      .def(nb::new_([](const std::string& name) {
        auto made = std::make_shared<Nic>(name);
        made->start();
        return made;
      }))
      .def("add", &add, "peer"_a, "fd"_a, "keys"_a = nb::bytes("", 0), "rings"_a.none() = nb::none(),
           "resumes"_a = false,
           "Takes over the descriptor of a connected socket to a peer, and the memory shared with "
           "it. Encrypts with `keys`, 16 bytes for sending and 16 for receiving, if there are any; "
           "not in shared memory. `resumes`: the connection outlives the socket; both ends have to "
           "agree.")
      .def("resume", &resume, "peer"_a, "fd"_a, "keys"_a = nb::bytes("", 0),
           "Continues a connection over another socket. False if it has failed or ends; the socket "
           "is closed then.")
      .def("give_up", &Nic::give_up, nb::call_guard<Unlocked>(),
           "Fails a connection that has lost its socket.")
      .def("health", &health,
           "Whether the socket is lost, whether sent data is not acknowledged, acknowledged bytes, "
           "seconds since the last acknowledgement; None if there is nothing to resume.")
      .def("connected", &Nic::connected, "Whether there is a connection that has not failed.")
      .def("fail", &Nic::fail, nb::call_guard<Unlocked>())
      .def("close", &Nic::close, nb::call_guard<Unlocked>())
      .def("stop", &Nic::stop)
      .def("forget_after_fork", &Nic::forget_after_fork);
}

void bind_group(nb::module_& module) {
  nb::class_<Group>(module, "Group", "The connections to the members of a group.")
      .def(nb::new_([](std::shared_ptr<Nic> nic, std::uint64_t id, const std::vector<int>& ranks) {
        return std::make_shared<Group>(std::move(nic), id, ranks);
      }))
      .def("send",
           [](const std::shared_ptr<Group>& self, nb::object memory, std::uintptr_t address,
              std::uint64_t bytes, int peer, std::uint16_t channel, std::uint32_t tag) {
             return post(self, std::move(memory), address, bytes, peer, channel, tag, true);
           })
      .def("receive",
           [](const std::shared_ptr<Group>& self, nb::object memory, std::uintptr_t address,
              std::uint64_t bytes, int peer, std::uint16_t channel, std::uint32_t tag) {
             return post(self, std::move(memory), address, bytes, peer, channel, tag, false);
           })
      .def("end",
           [](Group& self, bool failed) {
             const Unlocked unlocked;
             Work work;
             self.end(failed, work);
             work.run();
           });
}

nb::object described(const Waiting& found) {
  return nb::make_tuple(found.number, found.index, found.peer, found.link, found.seconds,
                        found.reason);
}

// These types derive from enable_shared_from_this: nanobind would otherwise take the interpreter's
// lock when a lane, which holds its own lock, releases one of them.
void bind_packings(nb::module_& module) {
  nb::class_<Coding>(module, "Coding", "The codecs of a buffer's regions.")
      .def(nb::new_([] { return std::make_shared<Coding>(); }))
      .def("add",
           [](Coding& self, std::uint64_t start, std::uint64_t stop, int codec, bool feedback,
              int bits, bool by_error, bool ends, double density) {
             self.regions.push_back({start, stop, static_cast<Codec>(codec), feedback, bits,
                                     by_error ? Split::error : Split::count,
                                     ends ? Level::ends : Level::mean, density});
           });
  nb::class_<Packing>(module, "Packing", "The form in which chunks are sent.");
  nb::class_<CastPacking, Packing>(module, "CastPacking")
      .def(nb::new_([](int to) { return std::make_shared<CastPacking>(static_cast<Dtype>(to)); }));
  nb::class_<EncodedPacking, Packing>(module, "EncodedPacking")
      .def(nb::new_([](std::shared_ptr<Coding> coding, std::uintptr_t residual, unsigned threads) {
        return std::make_shared<EncodedPacking>(
            std::move(coding), reinterpret_cast<float*>(residual), threads);
      }));
  module.def("codec_work", [] {
    const auto of = [](CodecWork work) {
      const CodecClock::Total total = codec_clock().total(work);
      return std::tuple(total.calls, total.elements, total.ns);
    };
    return std::pair(of(CodecWork::pack), of(CodecWork::unpack));
  });
  using Seconds = std::optional<std::pair<double, double>>;
  module.def("pace_codecs", [](double factor, const Seconds& pack, const Seconds& unpack) {
    const auto price = [](const Seconds& own) -> std::optional<CodecClock::Price> {
      if (!own) return std::nullopt;
      return CodecClock::Price{1e9 * own->first, 1e9 * own->second};
    };
    codec_clock().set_pace({factor, {price(pack), price(unpack)}});
  }, nb::arg(), nb::arg().none(), nb::arg().none());
}

void bind_lane(nb::module_& module) {
  nb::class_<Program>(module, "Program")
      .def(nb::new_([](nb::handle first, nb::handle receives, nb::handle unlocks) {
        auto made = std::make_shared<Program>();
        made->first = transfers(first);
        made->receives = transfers(receives);
        for (const nb::handle each : unlocks) made->unlocks.push_back(transfers(each));
        return made;
      }));
  nb::class_<Completions>(module, "Completions")
      .def(nb::new_([] { return std::make_shared<Completions>(); }))
      .def("wait", &Completions::wait, nb::call_guard<Unlocked>())
      .def("close", &Completions::close);
  nb::class_<Task>(module, "Task")
      .def("wait", &Task::wait, nb::call_guard<Unlocked>())
      .def("report", &Task::report)
      .def_prop_ro("done", &Task::done)
      .def_prop_ro("failed", &Task::failed)
      .def_ro("begin_ns", &Task::begin_ns)
      .def_ro("received_ns", &Task::received_ns);
  nb::class_<Lane>(module, "Lane")
      .def(nb::new_([](std::vector<std::shared_ptr<Group>> links, std::uint16_t channel,
                       std::size_t ahead, std::size_t depth, std::uint32_t chunks_per_tag,
                       std::shared_ptr<Completions> completions, std::uint64_t number) {
        return std::make_shared<Lane>(std::move(links), channel, ahead, depth, chunks_per_tag,
                                      std::move(completions), number);
      }))
      .def("submit",
           [](Lane& self, std::shared_ptr<Program> program, std::uintptr_t address, int dtype,
              std::uint32_t base_tag, std::uint64_t number, std::shared_ptr<Task> after,
              std::shared_ptr<Packing> packing, std::uint64_t own_start, std::uint64_t own_stop, std::uint32_t rows,
              std::uint32_t own_row, std::uint64_t row_elements) {
             auto task = std::make_shared<Task>();
             task->program = std::move(program);
             task->after = std::move(after);
             task->buffer = at(address);
             task->dtype = static_cast<Dtype>(dtype);
             task->base_tag = base_tag;
             task->number = number;
             task->rows = rows;
             task->own_row = own_row;
             task->row_elements = row_elements;
             task->packing = std::move(packing);
             task->own_start = own_start;
             task->own_stop = own_stop;
             const Unlocked unlocked;
             self.submit(task);
             return task;
           },
           "program"_a, "address"_a, "dtype"_a, "base_tag"_a, "number"_a, "after"_a.none(),
           "packing"_a.none(), "own_start"_a, "own_stop"_a, "rows"_a, "own_row"_a, "row_elements"_a)
      .def("fail", &Lane::fail, nb::call_guard<Unlocked>())
      .def("waiting",
           [](Lane& self) -> nb::object {
             Waiting found;
             bool waits = false;
             {
               const Unlocked unlocked;
               waits = self.waiting(found);
             }
             return waits ? described(found) : nb::none();
           })
      .def("failure",
           [](Lane& self) -> nb::object {
             Waiting found;
             bool failed = false;
             {
               const Unlocked unlocked;
               failed = self.failure(found);
             }
             return failed ? described(found) : nb::none();
           });
}

}  // namespace

void bind_net(nb::module_& module) {
  bind_nic(module);
  bind_group(module);
  bind_packings(module);
  bind_lane(module);
}

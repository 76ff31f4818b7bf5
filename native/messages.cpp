#include "messages.h"

#include <nanobind/operators.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <variant>

#include "carrier.h"
#include "ending.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace wingbeat::messages;
using wingbeat::Unlocked;
using Peers = std::optional<std::set<std::uint32_t>>;
using Ids = std::array<std::uint32_t, 4>;

constexpr const char* dtypes[] = {"",        "uint8",    "int32",   "int64",
                                  "float16", "bfloat16", "float32", "float64"};
static_assert(std::size(dtypes) == last_dtype + 1);

// A payload above this size is sent while other threads use the interpreter.
constexpr std::size_t most_locked_bytes = 64 * 1024;
// How long a thread waits before it looks for signals, such as the user's interrupt.
constexpr double signal_check_s = 0.25;

// The bytes of an object, until `release`. Needs the interpreter's lock.
class View {
 public:
  explicit View(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  View(View&& other) noexcept : view_(std::exchange(other.view_, {})) {}
  ~View() { release(); }

  const std::uint8_t* data() const { return static_cast<const std::uint8_t*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }
  void release() { PyBuffer_Release(&view_); }

 private:
  Py_buffer view_{};
};

// A posted message as Python holds it, with the object whose memory it uses.
struct PostedObject : Posted {
  PostedObject(Header of, View from) : Posted(std::move(of), from.data()), view(std::move(from)) {}
  void release() override { view.release(); }

  View view;
};

// Calls it; an error of the system becomes an OSError.
template <class Call>
auto or_os_error(Call call) {
  try {
    return call();
  } catch (const std::system_error& error) {
    const nb::tuple arguments = nb::make_tuple(error.code().value(), error.code().message());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
    throw nb::python_error();
  }
}

Header make_header(std::uint8_t type, std::uint64_t session, std::uint32_t sender,
                   std::uint32_t receiver, std::uint64_t sequence, std::uint64_t arrived,
                   std::uint64_t taken, std::uint32_t kind, Ids ids, std::uint8_t dtype,
                   std::uint32_t length, std::vector<Span> spans) {
  if (spans.size() > most_spans) throw nb::value_error("too many spans");
  return {static_cast<Type>(type), session, sender, receiver, sequence, arrived, taken, kind, ids,
          dtype, length, std::move(spans)};
}

nb::bytes packed(const Header& header) {
  std::string out(header.size(), '\0');
  write_header(header, reinterpret_cast<std::uint8_t*>(out.data()));
  return nb::bytes(out.data(), out.size());
}

Header unpack(nb::handle data) {
  const View view(data);
  return read_header(view.data(), view.size());
}

nb::tuple tuple_of(const Ids& ids) { return nb::make_tuple(ids[0], ids[1], ids[2], ids[3]); }

void bind_header(nb::module_& module) {
  auto malformed = nb::exception<Malformed>(module, "Malformed", PyExc_ValueError);
  malformed.attr("__doc__") = "A frame that no process of this job has sent; `str` is the reason.";
  nb::class_<Header>(module, "Header")
      .def("__init__",
           [](Header* self, std::uint8_t type, std::uint64_t session, std::uint32_t sender,
              std::uint32_t receiver, std::uint64_t sequence, std::uint64_t arrived,
              std::uint64_t taken, std::uint32_t kind, Ids ids, std::uint8_t dtype,
              std::uint32_t length, std::vector<Span> spans) {
             new (self) Header(make_header(type, session, sender, receiver, sequence, arrived,
                                           taken, kind, ids, dtype, length, std::move(spans)));
           },
           "type"_a, "session"_a, "sender"_a, "receiver"_a, "sequence"_a = 0, "arrived"_a = 0,
           "taken"_a = 0, "kind"_a = 0, "ids"_a = Ids{}, "dtype"_a = 0, "length"_a = 0,
           "spans"_a = std::vector<Span>{})
      .def_prop_ro("size", &Header::size)
      .def_prop_ro("frame_bytes", &Header::frame_bytes)
      .def("pack", &packed)
      .def(nb::self == nb::self);
  module.def("unpack", &unpack);
}

void bind_posted(nb::module_& module) {
  nb::class_<Posted>(module, "Posted",
                     "A message that was posted; its payload must not change until `done`.")
      .def("done", [](const Posted& self) { return self.arrived.load(); },
           "Whether it has arrived, so that its payload may be changed. Does not wait.")
      .def_prop_ro("arrived", [](const Posted& self) { return self.arrived.load(); })
      .def_prop_ro("peer", [](const Posted& self) { return self.header.receiver; })
      .def_ro("size", &Posted::size);
}

int export_payload(PyObject* self, Py_buffer* view, int flags) {
  static std::uint8_t nothing = 0;
  auto* message = nb::inst_ptr<Received>(self);
  std::uint8_t* const data = message->payload == nullptr ? &nothing : message->payload.get();
  const std::size_t length = message->payload == nullptr ? 0 : message->header.length;
  return PyBuffer_FillInfo(view, self, data, static_cast<Py_ssize_t>(length), 0, flags);
}

PyType_Slot received_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(export_payload)},
    {0, nullptr},
};

void bind_received(nb::module_& module) {
  nb::class_<Received>(module, "Received", nb::type_slots(received_slots),
                       "A received message; the buffer is its payload.")
      .def_prop_ro("peer", [](const Received& self) { return self.route.peer; }, "The sender.")
      .def_prop_ro("interface", [](const Received& self) { return self.route.interface; },
                   "This process's interface over which it came.")
      .def_prop_ro("urgency", [](const Received& self) { return self.route.urgency; },
                   "Its class, 0 the most urgent.")
      .def_prop_ro("kind", [](const Received& self) { return self.header.kind; },
                   "The kind, defined by the application.")
      .def_prop_ro("ids", [](const Received& self) { return tuple_of(self.header.ids); },
                   "Four numbers whose meaning depends on the kind.")
      .def_prop_ro("dtype", [](const Received& self) { return dtypes[self.header.dtype]; },
                   "Dtype of the payload, or empty.")
      .def_prop_ro("spans",
                   [](const Received& self) { return nb::tuple(nb::cast(self.header.spans)); },
                   "(start, length) pairs, in elements of the dtype.")
      .def_prop_ro("payload",
                   [](nb::handle self) {
                     return nb::steal<nb::object>(PyMemoryView_FromObject(self.ptr()));
                   },
                   "The memory that the network wrote to, without another copy.")
      .def_prop_ro("nbytes", [](const Received& self) { return self.header.length; },
                   "Bytes of the payload.")
      .def_prop_ro("size", [](const Received& self) { return self.header.frame_bytes(); },
                   "Bytes that it occupies in the window.");
}

// A message with its own copy of the payload.
struct Copied : Posted {
  Copied(Header of, std::string from)
      : Posted(std::move(of), nullptr), contents(std::move(from)) {
    if (!contents.empty()) payload = reinterpret_cast<const std::uint8_t*>(contents.data());
  }

  std::string contents;
};

// The endpoint alone, in virtual time. A payload is its bytes, or a size without contents.
void bind_endpoint(nb::module_& module) {
  nb::class_<Endpoint>(module, "Endpoint")
      .def(nb::init<std::uint32_t, std::uint64_t, std::uint64_t, double>())
      .def("add",
           [](Endpoint& self, std::uint32_t peer, std::uint32_t interface, std::uint32_t urgency,
              std::uint64_t session) { self.add({peer, interface, urgency}, session); })
      .def("connected",
           [](Endpoint& self, std::uint32_t peer, std::uint32_t interface, std::uint32_t urgency,
              bool introduce,
              double now) { self.connected({peer, interface, urgency}, introduce, now); })
      .def("disconnected",
           [](Endpoint& self, std::uint32_t peer, std::uint32_t interface, std::uint32_t urgency,
              double now) { self.disconnected({peer, interface, urgency}, now); })
      .def("remove_peer", &Endpoint::remove_peer)
      .def("post",
           [](Endpoint& self, std::uint32_t peer, std::uint32_t interface, std::uint32_t urgency,
              std::uint32_t kind, std::variant<std::uint32_t, nb::bytes> payload, Ids ids,
              std::uint8_t dtype, double now) -> PostedPtr {
             std::string contents;
             if (const auto* bytes = std::get_if<nb::bytes>(&payload)) {
               contents.assign(bytes->c_str(), bytes->size());
             }
             const auto* size = std::get_if<std::uint32_t>(&payload);
             const auto length = size ? *size : static_cast<std::uint32_t>(contents.size());
             const PostedPtr posted = std::make_shared<Copied>(
                 make_header(static_cast<std::uint8_t>(Type::data), 0, 0, peer, 0, 0, 0, kind, ids,
                             dtype, length, {}),
                 std::move(contents));
             self.released.clear();
             return self.post({peer, interface, urgency}, posted, now) ? posted : nullptr;
           })
      .def("next",
           [](Endpoint& self, std::uint32_t peer, std::uint32_t interface, std::uint32_t urgency,
              double now) -> nb::object {
             const Frame frame = self.next({peer, interface, urgency}, now);
             if (frame.header == nullptr) return nb::none();
             nb::bytes contents("", 0);
             if (frame.message != nullptr && frame.message->payload != nullptr) {
               contents = nb::bytes(frame.message->payload, frame.header->length);
             }
             return nb::make_tuple(*frame.header, contents);
           })
      .def("take_busy",
           [](Endpoint& self) {
             nb::list out;
             for (const Route& each : self.take_busy()) {
               out.append(nb::make_tuple(each.peer, each.interface, each.urgency));
             }
             return out;
           })
      .def("accept",
           [](Endpoint& self, std::uint32_t peer, std::uint32_t interface, std::uint32_t urgency,
              const Header& header, nb::bytes contents, double now) {
             std::unique_ptr<std::uint8_t[]> payload;
             if (contents.size() > 0 && contents.size() == header.length) {
               payload = std::make_unique<std::uint8_t[]>(contents.size());
               std::memcpy(payload.get(), contents.c_str(), contents.size());
             }
             self.accept({peer, interface, urgency}, header, std::move(payload), now);
           })
      .def("take", [](Endpoint& self, double now, bool keep) { return self.take(now, nullptr, keep); },
           "now"_a, "keep"_a = false)
      .def("free", &Endpoint::free)
      .def("tick", &Endpoint::tick)
      .def("resume", &Endpoint::resume)
      .def("unconnected", &Endpoint::unconnected)
      .def("room",
           [](const Endpoint& self, std::uint32_t peer, std::uint32_t interface,
              std::uint32_t urgency) {
             const Flow* flow = self.flow({peer, interface, urgency});
             return flow->window() - flow->waiting_bytes();
           })
      .def_prop_ro("waiting", &Endpoint::waiting)
      .def_prop_ro("due", &Endpoint::due)
      .def_prop_ro("busy", &Endpoint::busy)
      .def_prop_ro("repeated", &Endpoint::repeated)
      .def_prop_ro("refused", [](const Endpoint& self) { return self.refused; })
      .def_prop_ro("has_met", [](const Endpoint& self) { return self.unheard() == nullptr; })
      .def_prop_ro("left", [](const Endpoint& self) { return self.left(); })
      .def_prop_ro("lost", [](const Endpoint& self) {
        nb::dict out;
        for (const auto& [peer, lost] : self.lost()) {
          out[nb::int_(peer)] = nb::make_tuple(lost.interface, lost.messages, lost.bytes);
        }
        return out;
      });
}

// Lets go of the payloads of messages that have arrived.
void release(Carrier& carrier) {
  if (!carrier.releasable()) return;
  for (const PostedPtr& each : carrier.released()) each->release();
}

// Calls `wait(seconds)` in slices, between which Python handles signals, until it returns true.
template <class Wait>
bool sliced(Carrier& carrier, double seconds, Wait wait) {
  bool done = false;
  while (true) {
    const double slice = std::min(seconds, signal_check_s);
    {
      const Unlocked unlocked;
      done = wait(std::max(0.0, slice));
    }
    release(carrier);
    if (done) return true;  // what it found must not be lost
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    seconds -= slice;
    if (seconds <= 0 || carrier.closed()) return false;
  }
}

nb::object post(Carrier& self, std::uint32_t peer, std::uint32_t interface, std::uint32_t urgency,
                std::uint32_t kind, nb::handle payload, Ids ids, std::uint8_t dtype,
                std::vector<Span> spans) {
  release(self);
  View view(payload);
  const std::size_t length = view.size();
  if (length > self.largest()) throw nb::value_error("the payload is too large");
  Header header = make_header(static_cast<std::uint8_t>(Type::data), 0, 0, peer, 0, 0, 0, kind, ids,
                              dtype, static_cast<std::uint32_t>(length), std::move(spans));
  const PostedPtr posted = std::make_shared<PostedObject>(std::move(header), std::move(view));
  const Route route{peer, interface, urgency};
  bool done = false;
  if (length > most_locked_bytes) {
    const Unlocked unlocked;
    done = self.post(route, posted);
  } else {
    done = self.post(route, posted);
  }
  return done ? nb::cast(posted) : nb::none();
}

void bind_carrier(nb::module_& module) {
  nb::class_<Carrier>(module, "Carrier")
      .def(nb::new_([](std::uint32_t number, std::uint64_t session, std::uint64_t message,
                       std::uint64_t window, double silence, double heartbeat, bool encrypted) {
        return or_os_error([&] {
          return std::make_shared<Carrier>(
              Options{number, session, message, window, silence, heartbeat, encrypted});
        });
      }))
      .def("listen",
           [](Carrier& self, std::uint32_t interface, std::uint32_t urgency,
              const std::string& address, int tos) {
             return or_os_error([&] { return self.listen(interface, urgency, address, tos); });
           })
      .def("close_listeners_except", &Carrier::close_listeners_except)
      .def("start", &Carrier::start)
      .def("allow",
           [](Carrier& self, std::uint32_t peer, std::uint64_t session, nb::bytes key) {
             wingbeat::Digest digest;
             if (key.size() != digest.size()) throw nb::value_error("a key has 32 bytes");
             std::memcpy(digest.data(), key.c_str(), digest.size());
             self.allow(peer, session, digest);
           })
      .def("add_route",
           [](Carrier& self, std::uint32_t peer, std::uint32_t interface, std::uint32_t urgency,
              const std::string& address, int port, std::uint32_t theirs) {
             self.add_route({peer, interface, urgency}, address, port, theirs);
           })
      .def("remove_peer",
           [](Carrier& self, std::uint32_t peer) {
             self.remove_peer(peer);
             release(self);
           })
      .def("post", &post)
      .def("free", &Carrier::free)
      .def("poll",
           [](Carrier& self, const Peers& of, bool keep) {
             const auto* peers = of ? &*of : nullptr;
             ReceivedPtr message = self.take(peers, keep);
             if (message == nullptr) {
               const Unlocked unlocked;  // it may read many bytes
               self.refresh();
               message = self.take(peers, keep);
             }
             return message;
           },
           "of"_a.none(), "keep"_a)
      .def("receive",
           [](Carrier& self, double seconds, std::uint64_t seen, const Peers& of, bool keep,
              bool interruptible) {
             ReceivedPtr message;
             sliced(self, seconds, [&](double slice) {
               return self.receive(slice, seen, of ? &*of : nullptr, keep, interruptible, message);
             });
             return message;
           },
           "seconds"_a, "seen"_a, "of"_a.none(), "keep"_a, "interruptible"_a)
      .def("wait_arrived",
           [](Carrier& self, double seconds, std::uint64_t seen,
              const std::vector<PostedPtr>& messages) {
             return sliced(self, seconds, [&](double slice) {
               return self.wait_arrived(slice, seen, messages);
             });
           })
      .def("wait_room",
           [](Carrier& self, double seconds, std::uint64_t seen, std::uint32_t peer,
              std::uint32_t interface, std::uint32_t urgency, std::uint64_t bytes) {
             return sliced(self, seconds, [&](double slice) {
               return self.wait_room(slice, seen, {peer, interface, urgency}, bytes);
             });
           })
      .def("wait_heard",
           [](Carrier& self, double seconds) {
             return sliced(self, seconds, [&](double slice) { return self.wait_heard(slice); });
           })
      .def("interrupt", &Carrier::interrupt)
      .def("leave",
           [](Carrier& self, double seconds) {
             self.leave();
             sliced(self, seconds, [&](double slice) { return self.wait_finished(slice); });
             return self.unfinished();
           })
      .def("close",
           [](Carrier& self, double seconds) {
             {
               const Unlocked unlocked;
               self.close(seconds);
             }
             release(self);
           })
      .def("abandon",
           [](Carrier& self) {
             self.abandon();
             release(self);
           })
      .def("forget_after_fork", &Carrier::forget_after_fork)
      .def("room",
           [](Carrier& self, std::uint32_t peer, std::uint32_t interface, std::uint32_t urgency) {
             return self.inspect([&](const Endpoint& endpoint) -> std::int64_t {
               const Flow* flow = endpoint.flow({peer, interface, urgency});
               if (flow == nullptr) return 0;
               return static_cast<std::int64_t>(flow->window()) -
                      static_cast<std::int64_t>(flow->waiting_bytes());
             });
           })
      .def("unconnected",
           [](Carrier& self) { return self.unconnected(); })
      .def("unheard",
           [](Carrier& self) -> nb::object {
             std::optional<Route> route;
             self.inspect([&](const Endpoint& endpoint) {
               if (const Route* found = endpoint.unheard()) route = *found;
               return true;
             });
             return route ? nb::make_tuple(route->peer, route->interface) : nb::object(nb::none());
           })
      .def_prop_ro("lost",
                   [](Carrier& self) {
                     const auto lost = self.inspect(
                         [](const Endpoint& endpoint) { return endpoint.lost(); });
                     nb::dict out;
                     for (const auto& [peer, of] : lost) {
                       out[nb::int_(peer)] = nb::make_tuple(of.interface, of.messages, of.bytes);
                     }
                     return out;
                   })
      .def_prop_ro("left",
                   [](Carrier& self) {
                     return self.inspect([](const Endpoint& endpoint) { return endpoint.left(); });
                   })
      .def_prop_ro("refused",
                   [](Carrier& self) {
                     return self.inspect([](const Endpoint& endpoint) { return endpoint.refused; });
                   })
      .def_prop_ro("refused_connections", &Carrier::refused_connections)
      .def_prop_ro("waiting",
                   [](Carrier& self) {
                     return self.inspect([](const Endpoint& endpoint) { return endpoint.waiting(); });
                   })
      .def_prop_ro("ended", &Carrier::ended)
      .def_prop_ro("changes", &Carrier::changes)
      .def_prop_ro("troubled", &Carrier::troubled);
}

}  // namespace

void bind_messages(nb::module_& module) {
  // A process that ends while a mailbox is open has lost nothing; a warning would confuse.
  nb::set_leak_warnings(false);
  nb::list names;
  for (const char* each : dtypes) names.append(each);
  module.attr("DTYPES") = nb::tuple(names);
  bind_header(module);
  bind_posted(module);
  bind_received(module);
  bind_endpoint(module);
  bind_carrier(module);
}

#include "messages.h"

#include <nanobind/operators.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>

#include "ending.h"
#include "flow.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace wingbeat::messages;

// Payloads up to this size travel in one piece with their header: a copy is cheaper there.
constexpr std::size_t most_inline = 16 * 1024;

// The bytes of an object, for as long as this lives.
class Bytes {
 public:
  explicit Bytes(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() { PyBuffer_Release(&view_); }

  const std::uint8_t* data() const { return static_cast<const std::uint8_t*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

struct PostedObject : Posted {
  PostedObject(Header of, nb::object from) : Posted(std::move(of)), payload(std::move(from)) {}

  void arrive() override {
    Posted::arrive();
    payload.reset();
  }

  nb::object payload;
};

Header make_header(std::uint8_t type, std::uint64_t session, std::uint32_t sender,
                   std::uint32_t receiver, std::uint64_t sequence, std::uint64_t arrived,
                   std::uint64_t taken, std::uint32_t kind, std::array<std::uint32_t, 4> ids,
                   std::uint8_t dtype, std::uint32_t length, std::vector<Span> spans) {
  if (spans.size() > most_spans) throw nb::value_error("too many spans");
  return {static_cast<Type>(type), session, sender, receiver, sequence, arrived, taken, kind, ids,
          dtype, length, std::move(spans)};
}

// A header, and what else is to travel in the same piece.
nb::bytes packed(const Header& header, nb::handle payload = {}) {
  const std::size_t length = payload.is_valid() ? header.length : 0;
  const std::size_t size = header.size() + length;
  nb::object bytes =
      nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
  if (!bytes.is_valid()) throw nb::python_error();
  auto* out = reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(bytes.ptr()));
  write_header(header, out);
  if (length > 0) {
    const Bytes from(payload);
    if (from.size() != length) throw nb::value_error("a payload has changed its size");
    std::memcpy(out + header.size(), from.data(), length);
  }
  return nb::borrow<nb::bytes>(bytes);
}

Header unpack(nb::handle data) {
  const Bytes from(data);
  return read_header(from.data(), from.size());
}

// A frame in the pieces in which it travels.
nb::list parts_of(const Frame& frame) {
  nb::list parts;
  if (frame.message == nullptr) {
    parts.append(packed(*frame.header));
    return parts;
  }
  const auto& payload = static_cast<const PostedObject&>(*frame.message).payload;
  if (frame.header->length <= most_inline) {
    parts.append(packed(*frame.header, payload));
  } else {
    parts.append(packed(*frame.header));
    parts.append(payload);
  }
  return parts;
}

// Hands over what may be sent now: each frame to send(place, parts), until it says that it cannot.
void flush(Flow& flow, nb::handle send, nb::handle place, double now) {
  while (true) {
    const Frame frame = flow.next(now);
    if (frame.header == nullptr) return;
    const nb::list parts = parts_of(frame);
    PyObject* const arguments[] = {place.ptr(), parts.ptr()};
    // It uses sockets, during which the interpreter is others'.
    const auto taken = nb::steal(wingbeat::or_wait_for_the_end(
        [&] { return PyObject_Vectorcall(send.ptr(), arguments, 2, nullptr); }));
    if (!taken.is_valid()) throw nb::python_error();
    if (!nb::cast<bool>(taken)) return flow.down();
    flow.sent(frame, now);
  }
}

void bind_fields(nb::class_<Header>& header) {
  header.def_prop_ro("type", [](const Header& self) { return static_cast<int>(self.type); })
      .def_ro("session", &Header::session)
      .def_ro("sender", &Header::sender)
      .def_ro("receiver", &Header::receiver)
      .def_ro("sequence", &Header::sequence)
      .def_ro("kind", &Header::kind)
      .def_prop_ro("ids",
                   [](const Header& self) {
                     const auto& [a, b, c, d] = self.ids;
                     return nb::make_tuple(a, b, c, d);
                   })
      .def_ro("dtype", &Header::dtype)
      .def_ro("length", &Header::length)
      .def_prop_ro("spans", [](const Header& self) { return nb::tuple(nb::cast(self.spans)); });
}

void bind_header(nb::module_& module) {
  auto malformed = nb::exception<Malformed>(module, "Malformed", PyExc_ValueError);
  malformed.attr("__doc__") = "A frame that no job of ours has sent; `str` is the reason.";
  nb::class_<Header> header(module, "Header");
  bind_fields(header);
  header
      .def("__init__",
           [](Header* self, std::uint8_t type, std::uint64_t session, std::uint32_t sender,
              std::uint32_t receiver, std::uint64_t sequence, std::uint64_t arrived,
              std::uint64_t taken, std::uint32_t kind, std::array<std::uint32_t, 4> ids,
              std::uint8_t dtype, std::uint32_t length, std::vector<Span> spans) {
             new (self) Header(make_header(type, session, sender, receiver, sequence, arrived,
                                           taken, kind, ids, dtype, length, std::move(spans)));
           },
           "type"_a, "session"_a, "sender"_a, "receiver"_a, "sequence"_a = 0, "arrived"_a = 0,
           "taken"_a = 0, "kind"_a = 0, "ids"_a = std::array<std::uint32_t, 4>{}, "dtype"_a = 0,
           "length"_a = 0, "spans"_a = std::vector<Span>{})
      .def_prop_ro("size", &Header::size)
      .def_prop_ro("frame_bytes", &Header::frame_bytes)
      .def("pack", [](const Header& self) { return packed(self); })
      .def(nb::self == nb::self);
  module.def("unpack", &unpack);
}

void bind_posted(nb::module_& module) {
  nb::class_<PostedObject>(module, "Posted",
                           "A message that was posted; its payload must not change until `done`.")
      .def("__init__",
           [](PostedObject* self, std::uint8_t type, std::uint32_t kind,
              std::array<std::uint32_t, 4> ids, std::uint8_t dtype, std::vector<Span> spans,
              nb::object payload) {
             const auto length = static_cast<std::uint32_t>(nb::len(payload));
             new (self) PostedObject(
                 make_header(type, 0, 0, 0, 0, 0, 0, kind, ids, dtype, length, std::move(spans)),
                 std::move(payload));
           })
      .def("done", [](const PostedObject& self) { return self.arrived; },
           "Whether it has arrived, so that its payload may be changed. Does not wait.")
      .def_prop_ro("arrived", [](const PostedObject& self) { return self.arrived; })
      .def_prop_ro("size", [](const PostedObject& self) { return self.size; });
}

void bind_state(nb::class_<Flow>& flow) {
  flow.def_ro("met", &Flow::met)
      .def_ro("up", &Flow::up)
      .def_ro("repeated", &Flow::repeated)
      .def_prop_ro("window", &Flow::window)
      .def_prop_ro("waiting_bytes", &Flow::waiting_bytes)
      .def_prop_ro("room",
                   [](const Flow& self) {
                     return static_cast<std::int64_t>(self.window()) -
                            static_cast<std::int64_t>(self.waiting_bytes());
                   })
      .def_prop_ro("unarrived", &Flow::unarrived)
      .def_prop_ro("empty", &Flow::empty)
      .def_prop_ro("only_leave", &Flow::only_leave)
      .def_prop_ro("arrived", &Flow::arrived)
      .def_prop_ro("ended", &Flow::ended)
      .def_prop_ro("tell_at", &Flow::tell_at)
      .def_prop_ro("pending", &Flow::pending)
      .def_prop_ro("due", &Flow::due);
}

void bind_flow(nb::module_& module) {
  nb::class_<Flow> flow(module, "Flow");
  bind_state(flow);
  flow
      .def("__init__",
           [](Flow* self, std::uint64_t session, std::uint32_t own, std::uint64_t peer_session,
              std::uint32_t peer, std::uint64_t window, double silence) {
             new (self) Flow({session, own, peer_session, peer}, window, silence);
           })
      .def("holds", [](const Flow& self, const PostedObject& each) { return self.holds(each); })
      .def("names", &Flow::names)
      .def("post",
           [](Flow& self, std::shared_ptr<PostedObject> message, double now) {
             self.post(std::move(message), now);
           })
      .def("hello", &Flow::hello)
      .def("accept", &Flow::accept, "header"_a, "now"_a, "renewed"_a = false)
      .def("take", &Flow::take)
      .def("tell", &Flow::tell)
      .def("tick", &Flow::tick)
      .def("resume", &Flow::resume)
      .def("flush", &flush);
}

}  // namespace

void bind_messages(nb::module_& module) {
  // Whoever ends while a mailbox is open has lost nothing, and need not read of objects of ours.
  nb::set_leak_warnings(false);
  module.attr("MOST_INLINE") = most_inline;
  module.attr("MOST_UNDER_WAY") = most_messages_under_way;
  bind_header(module);
  bind_posted(module);
  bind_flow(module);
}

// A device of PyTorch (PrivateUse1) for tests, on which a missing wait is a wrong number.
//
// Its memory is host memory, its kernels are those of the CPU. What is enqueued on a stream runs in
// a thread of the device, late, in an order of streams that a seed chooses. Memory is NaN (bytes of
// 0xff) from its allocation, and again from its release on, which happens in the order of the stream
// that it was allocated on, as in a caching allocator. The destination of a copy to the host is NaN
// until the copy has run. Synchronisations of the host are counted by thread.

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/syscall.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

extern "C" {
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace {

constexpr auto kKey = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 8;
constexpr int kPoison = 0xff;

using Clock = std::chrono::steady_clock;

// ---- streams ------------------------------------------------------------------------

struct Event {
  c10::DeviceIndex device;
  uint64_t recorded = 0, done = 0;
  Clock::time_point at;
};

struct Job {
  enum Kind { kRun, kRecord, kWait } kind;
  std::function<void()> run;
  std::shared_ptr<Event> event;
  uint64_t version;
  Clock::time_point eligible;
};

struct Queue {
  std::deque<Job> jobs;
  double lag = 0;  // seconds, of this stream behind the host
  uint64_t submitted = 0, completed = 0;
};

struct Device {
  std::map<c10::StreamId, std::shared_ptr<Queue>> queues;  // a thread may wait for one meanwhile
  c10::StreamId created = 0;
  std::mt19937_64 random;
  std::condition_variable work, progress;
  std::thread thread;
};

struct State {
  std::mutex mutex;
  Device devices[kDevices];
  uint64_t seed = 0, ignored_waits = 0, jobs = 0;
  bool stopping = false, ignore_waits = false;
  std::map<long, uint64_t> synchronizations;
  std::string error;
  std::set<const void*> pinned;
  std::map<const char*, size_t> blocks;  // memory that is not released
};

State& state() {
  static State* made = new State;  // never destroyed: threads may outlive static objects
  return *made;
}

thread_local c10::DeviceIndex current_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;

std::shared_ptr<Queue> queue_of(Device& device, c10::StreamId id) {
  auto& found = device.queues[id];
  if (found == nullptr) {
    // A whole stream is late, rather than each job: others overtake it, and nothing takes longer.
    static const double lags[] = {0, 0.0003, 0.001, 0.003};
    found = std::make_shared<Queue>();
    found->lag = lags[device.random() % 4];
  }
  return found;
}

void serve(int index) {
  auto& s = state();
  auto& device = s.devices[index];
  std::unique_lock lock(s.mutex);
  while (!s.stopping) {
    const auto now = Clock::now();
    auto wake = now + std::chrono::seconds(1);
    std::vector<std::shared_ptr<Queue>> ready;
    for (auto& [id, queue] : device.queues) {
      if (queue->jobs.empty()) continue;
      auto& job = queue->jobs.front();
      if (job.eligible > now) {
        wake = std::min(wake, job.eligible);
      } else if (job.kind != Job::kWait || job.event->done >= job.version) {
        ready.push_back(queue);
      }
    }
    if (ready.empty()) {
      device.work.wait_until(lock, wake);
      continue;
    }
    const auto queue = ready[device.random() % ready.size()];
    auto job = std::move(queue->jobs.front());
    queue->jobs.pop_front();
    if (job.kind == Job::kRun) {
      lock.unlock();
      try {
        job.run();
      } catch (const std::exception& error) {
        std::lock_guard again(s.mutex);
        if (s.error.empty()) s.error = error.what();
      }
      job.run = nullptr;
      lock.lock();
    } else if (job.kind == Job::kRecord) {
      job.event->done = std::max(job.event->done, job.version);
      job.event->at = Clock::now();
      for (auto& other : s.devices) other.work.notify_all();
    }
    ++queue->completed;
    device.progress.notify_all();
  }
}

void check_error(const State& s) {
  TORCH_CHECK(s.error.empty(), "a kernel of the late device failed: ", s.error);
}

// The caller holds the lock.
void submit(State& s, const c10::Stream& stream, Job job) {
  auto& device = s.devices[stream.device_index()];
  if (!device.thread.joinable()) device.thread = std::thread(serve, stream.device_index());
  const auto queue = queue_of(device, stream.id());
  const double jitter = 0.5 + double(device.random() % 1024) / 1024;
  job.eligible = Clock::now() + std::chrono::microseconds(int64_t(queue->lag * jitter * 1e6));
  queue->jobs.push_back(std::move(job));
  ++queue->submitted;
  ++s.jobs;
  device.work.notify_one();
}

void enqueue(const c10::Stream& stream, std::function<void()> run) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  check_error(s);
  submit(s, stream, Job{Job::kRun, std::move(run), nullptr, 0, {}});
}

// Fails for an address in memory that the allocator may have reused.
void check_held(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  std::lock_guard lock(state().mutex);
  auto& blocks = state().blocks;
  const auto next = blocks.upper_bound(data);
  const bool held = next != blocks.begin() && data < std::prev(next)->first + std::prev(next)->second;
  TORCH_CHECK(held, "memory is used after its release: record_stream() is missing");
}

// Without the GIL while the host waits: a job may release the last reference to a Python object.
struct Unlocked {
  void* thread = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~Unlocked() {
    if (thread != nullptr) PyEval_RestoreThread(thread);
  }
};

void count_synchronization(State& s) { ++s.synchronizations[long(syscall(SYS_gettid))]; }

void wait_for_queue(std::unique_lock<std::mutex>& lock, Device& device, c10::StreamId id) {
  const auto queue = queue_of(device, id);
  const auto all = queue->submitted;
  device.progress.wait(lock, [&] { return queue->completed >= all; });
}

void synchronize(const c10::Stream& stream) {
  const Unlocked unlocked;
  auto& s = state();
  std::unique_lock lock(s.mutex);
  count_synchronization(s);
  wait_for_queue(lock, s.devices[stream.device_index()], stream.id());
  check_error(s);
}

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kKey, device), id);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  const auto found = current_streams.find(device);
  return stream_of(device, found == current_streams.end() ? 0 : found->second);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kKey; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const auto before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kKey, current_device); }
  void setDevice(c10::Device to) const override {
    TORCH_CHECK(to.index() < kDevices, "there is no late device ", int(to.index()));
    uncheckedSetDevice(to);
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.index() >= 0) current_device = to.index();
  }
  c10::Stream getStream(c10::Device of) const override { return current_stream(index(of)); }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream_of(index(of), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    return getNewStream(of, 0);
  }
  c10::Stream getNewStream(c10::Device of, int) const override {
    auto& s = state();
    std::lock_guard lock(s.mutex);
    return stream_of(index(of), ++s.devices[index(of)].created);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const auto before = current_stream(to.device_index());
    current_streams[to.device_index()] = to.id();
    return before;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<std::shared_ptr<Event>*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new std::shared_ptr<Event>(new Event{stream.device_index()});
    }
    auto& made = *static_cast<std::shared_ptr<Event>*>(*event);
    auto& s = state();
    std::lock_guard lock(s.mutex);
    submit(s, stream, Job{Job::kRecord, nullptr, made, ++made->recorded, {}});
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    auto& made = *static_cast<std::shared_ptr<Event>*>(event);
    auto& s = state();
    std::lock_guard lock(s.mutex);
    if (s.ignore_waits) {
      ++s.ignored_waits;
    } else {
      submit(s, stream, Job{Job::kWait, nullptr, made, made->recorded, {}});
    }
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    auto& made = *static_cast<std::shared_ptr<Event>*>(event);
    std::lock_guard lock(state().mutex);
    return made->done >= made->recorded;
  }
  void synchronizeEvent(void* event) const override {
    const Unlocked unlocked;
    auto& s = state();
    std::unique_lock lock(s.mutex);
    count_synchronization(s);
    if (event == nullptr) return;
    auto made = *static_cast<std::shared_ptr<Event>*>(event);
    const auto version = made->recorded;
    s.devices[made->device].progress.wait(lock, [&] { return made->done >= version; });
    check_error(s);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto& a = *static_cast<std::shared_ptr<Event>*>(first);
    auto& b = *static_cast<std::shared_ptr<Event>*>(second);
    std::lock_guard lock(state().mutex);
    return std::chrono::duration<double, std::milli>(b->at - a->at).count();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& stream) const override {
    auto& s = state();
    std::lock_guard lock(s.mutex);
    const auto queue = queue_of(s.devices[stream.device_index()], stream.id());
    return queue->completed >= queue->submitted;
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    const Unlocked unlocked;
    auto& s = state();
    std::unique_lock lock(s.mutex);
    count_synchronization(s);
    auto& device = s.devices[index < 0 ? current_device : index];
    std::vector<c10::StreamId> ids;
    for (auto& [id, queue] : device.queues) ids.push_back(id);
    for (const auto id : ids) wait_for_queue(lock, device, id);
    check_error(s);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;

 private:
  static c10::DeviceIndex index(c10::Device of) {
    return of.index() < 0 ? current_device : of.index();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- memory -------------------------------------------------------------------------

struct Block {
  void* data;
  size_t nbytes;
  c10::Stream stream;
  std::set<c10::StreamId> used_on;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  auto& s = state();
  std::lock_guard lock(s.mutex);
  if (s.stopping) return;
  for (const auto id : block->used_on) {
    auto event = std::make_shared<Event>(Event{block->stream.device_index()});
    event->recorded = 1;
    submit(s, stream_of(block->stream.device_index(), id), Job{Job::kRecord, nullptr, event, 1, {}});
    submit(s, block->stream, Job{Job::kWait, nullptr, event, 1, {}});
  }
  auto free_block = [block] {
    {
      std::lock_guard again(state().mutex);
      state().blocks.erase(static_cast<const char*>(block->data));
    }
    std::memset(block->data, kPoison, block->nbytes);  // as a reuse of the memory would
    std::free(block->data);
    delete block;
  };
  submit(s, block->stream, Job{Job::kRun, std::move(free_block), nullptr, 0, {}});
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device(kKey, current_device);
    if (nbytes == 0) return {nullptr, device};
    auto* data = std::aligned_alloc(64, (nbytes + 63) / 64 * 64);
    std::memset(data, kPoison, nbytes);
    auto* block = new Block{data, nbytes, current_stream(current_device), {}};
    std::lock_guard lock(state().mutex);
    state().blocks[static_cast<const char*>(data)] = nbytes;
    return {data, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
};

void release_pinned(void* data) {
  {
    std::lock_guard lock(state().mutex);
    state().pinned.erase(data);
  }
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, c10::kCPU};
    auto* data = std::aligned_alloc(64, (nbytes + 63) / 64 * 64);
    std::memset(data, kPoison, nbytes);
    std::lock_guard lock(state().mutex);
    state().pinned.insert(data);
    return {data, data, &release_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(kKey, &device_allocator)

bool is_pinned(const void* data) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  return s.pinned.count(data) > 0;
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  auto* block = static_cast<Block*>(data.get_context());
  if (block == nullptr || block->stream == stream) return;
  std::lock_guard lock(state().mutex);
  block->used_on.insert(stream.id());
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex to) const override { current_device = to; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    const auto before = current_device;
    if (to >= 0) current_device = to;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override {
    return exchangeDevice(to);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto grown = device_allocator.allocate(nbytes);
    auto old = storage.set_data_ptr(std::move(grown));
    const auto count = std::min(nbytes, storage.nbytes());
    auto* from = old.get();
    auto* to = storage.mutable_data();
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
    if (count > 0) {
      enqueue(current_stream(storage.device().index()), [=] { std::memcpy(to, from, count); });
    }
  }
};

// ---- kernels ------------------------------------------------------------------------

bool is_late(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kKey;
}

void keep_wrapped(const at::Tensor& made, const at::Tensor& from) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) {
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
}

// The same memory as a tensor of the CPU. It does not keep the memory.
at::Tensor on_cpu(const at::Tensor& tensor) {
  auto* data = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  if (data != nullptr) data += tensor.storage_offset() * int64_t(tensor.itemsize());
  auto made = at::from_blob(data, tensor.sizes(), tensor.strides(), [](void*) {},
                            tensor.options().device(c10::kCPU).pinned_memory(false));
  keep_wrapped(made, tensor);
  return made;
}

// A view of the storage of `base`, at an offset in elements.
at::Tensor view_of(const at::Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides,
                   int64_t offset, at::ScalarType dtype) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(),
      c10::scalarTypeToTypeMeta(dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return made;
}

int64_t extent(const at::Tensor& tensor) {
  int64_t last = 0;
  if (tensor.numel() == 0) return 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return last + 1;
}

// Valid values in the same layout, to learn what an operator returns.
at::Tensor stand_in(const at::Tensor& tensor) {
  const int value = at::isFloatingType(tensor.scalar_type()) ? 1 : 0;
  auto flat = at::full({extent(tensor)}, value, tensor.options().device(c10::kCPU).pinned_memory(false));
  auto made = at::as_strided(flat, tensor.sizes(), tensor.strides(), 0);
  keep_wrapped(made, tensor);
  return made;
}

// A copy of a tensor of the host, which an operator takes where it is a number or an index.
at::Tensor host_value(const at::Tensor& tensor) {
  const bool is_index = !at::isFloatingType(tensor.scalar_type());
  TORCH_CHECK(tensor.dim() == 0 || is_index, "expected all tensors on one device, found cpu too");
  auto value = at::empty(tensor.sizes(), tensor.options().pinned_memory(false)).copy_(tensor);
  keep_wrapped(value, tensor);
  return value;
}

using Change = std::function<at::Tensor(const at::Tensor&)>;

c10::IValue map_tensors(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& each : value.toTensorVector()) {
      made.push_back(each.defined() ? change(each) : each);
    }
    return made;
  }
  if (value.isDevice() && value.toDevice().type() == kKey) return c10::Device(c10::kCPU);
  if (value.isList()) {
    auto made = c10::impl::GenericList(value.toList().elementType());
    for (const c10::IValue& each : value.toList().vec()) made.push_back(map_tensors(each, change));
    return made;
  }
  return value;
}

using Stack = torch::jit::Stack;

struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

void run_late(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  Stack arguments(stack->end() - long(count), stack->end());
  stack->resize(stack->size() - count);

  // 1. What it returns, from values that are not read.
  std::vector<at::Tensor> given, dummies;
  Stack trial;
  for (const auto& each : arguments) {
    trial.push_back(map_tensors(each, [&](const at::Tensor& tensor) {
      for (size_t i = 0; i < given.size(); ++i) {
        if (given[i].is_same(tensor)) return dummies[i];
      }
      given.push_back(tensor);
      dummies.push_back(is_late(tensor) ? stand_in(tensor) : host_value(tensor));
      return dummies.back();
    }));
  }
  c10::DeviceIndex device = current_device;
  for (const auto& each : given) {
    if (is_late(each)) {
      device = each.device().index();
      break;
    }
  }
  std::vector<std::vector<int64_t>> before;
  for (const auto& each : dummies) before.push_back(each.sizes().vec());
  {
    BelowAutograd guard;
    op.callBoxed(&trial);
  }
  const auto stream = current_stream(device);
  for (size_t i = 0; i < given.size(); ++i) {
    if (is_late(given[i]) && dummies[i].sizes() != at::IntArrayRef(before[i])) {
      given[i].resize_(dummies[i].sizes());  // an `out` argument
    }
  }

  // 2. What is returned now: arguments, views of them, or new memory.
  std::vector<std::pair<size_t, at::Tensor>> fresh;  // numbers of results, and their memory
  size_t number = 0;
  bool reads_values = trial.empty() ? false : true;
  for (const auto& each : trial) {
    if (each.isTensor() || each.isTensorList()) reads_values = false;
  }
  Stack results;
  for (const auto& each : trial) {
    results.push_back(map_tensors(each, [&](const at::Tensor& result) -> at::Tensor {
      const auto place = number++;
      for (size_t i = 0; i < given.size(); ++i) {
        if (result.is_same(dummies[i])) return given[i];
        if (result.storage().is_alias_of(dummies[i].storage()) && is_late(given[i])) {
          const auto scale = int64_t(given[i].itemsize());
          const auto bytes = result.storage_offset() * int64_t(result.itemsize()) +
                             given[i].storage_offset() * scale;
          return view_of(given[i], result.sizes(), result.strides(),
                         bytes / int64_t(result.itemsize()), result.scalar_type());
        }
      }
      const c10::DeviceGuard guard(c10::Device(kKey, device));
      at::Tensor made = at::detail::empty_strided_generic(
          result.sizes(), result.strides(), &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
          result.scalar_type());
      fresh.emplace_back(place, on_cpu(made));
      return made;
    }));
  }

  // 3. The work, in the order of the stream.
  Stack work;
  for (const auto& each : arguments) {
    work.push_back(map_tensors(each, [](const at::Tensor& tensor) {
      return is_late(tensor) ? on_cpu(tensor) : host_value(tensor);
    }));
  }
  auto values = std::make_shared<Stack>();
  std::vector<at::Tensor> used;
  for (const auto& each : given) {
    if (is_late(each)) used.push_back(on_cpu(each));
  }
  enqueue(stream, [op, work, fresh, values, used]() mutable {
    BelowAutograd guard;
    for (const auto& each : used) check_held(each);
    op.callBoxed(&work);
    size_t place = 0, next = 0;
    for (const auto& each : work) {
      map_tensors(each, [&](const at::Tensor& result) {
        if (next < fresh.size() && fresh[next].first == place) fresh[next++].second.copy_(result);
        ++place;
        return result;
      });
    }
    *values = work;
  });
  if (reads_values) {
    synchronize(stream);
    results = *values;
  }
  for (auto& each : results) stack->push_back(std::move(each));
}

// Operators whose results have a size that depends on values: the host waits.
void run_synchronously(const c10::OperatorHandle& op, Stack* stack) {
  const auto count = op.schema().arguments().size();
  c10::DeviceIndex device = current_device;
  for (auto it = stack->end() - long(count); it != stack->end(); ++it) {
    map_tensors(*it, [&](const at::Tensor& tensor) {
      if (is_late(tensor)) device = tensor.device().index();
      return tensor;
    });
  }
  synchronize(current_stream(device));
  Stack work;
  for (auto it = stack->end() - long(count); it != stack->end(); ++it) {
    work.push_back(map_tensors(*it, [](const at::Tensor& t) { return is_late(t) ? on_cpu(t) : t; }));
  }
  stack->resize(stack->size() - count);
  {
    BelowAutograd guard;
    op.callBoxed(&work);
  }
  for (const auto& each : work) {
    stack->push_back(map_tensors(each, [&](const at::Tensor& result) {
      const c10::DeviceGuard guard(c10::Device(kKey, device));
      at::Tensor made = at::detail::empty_strided_generic(
          result.sizes(), result.strides(), &device_allocator,
          c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.scalar_type());
      on_cpu(made).copy_(result);
      return made;
    }));
  }
}

// Other devices than those of torch have their convolutions under a name of their own.
void convolution(const c10::OperatorHandle&, Stack* stack) {
  run_late(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack);
}

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  const auto first = stack->end() - 10;
  const auto weight = (first + 2)->toTensor();
  const bool transposed = (first + 6)->toBool();
  const auto outputs = transposed ? weight.size(1) * (first + 8)->toInt() : weight.size(0);
  stack->insert(first + 3, c10::List<int64_t>({outputs}));
  run_late(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""), stack);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(
      device.has_value() && device->has_index() ? *device : c10::Device(kKey, current_device));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(
      device.has_value() && device->has_index() ? *device : c10::Device(kKey, current_device));
  return at::detail::empty_generic(size, &device_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return view_of(self, size, stride, offset.value_or(self.storage_offset()), self.scalar_type());
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const auto needed = size_t(self.numel() + self.storage_offset()) * self.itemsize();
  if (needed > self.storage().nbytes()) {
    const c10::DeviceGuard guard(self.device());
    Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  if (stride.empty() && !size.empty()) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    self.unsafeGetTensorImpl()->set_storage_offset(offset);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto count = int64_t(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

at::Scalar local_scalar(const at::Tensor& self) {
  synchronize(current_stream(self.device().index()));
  return on_cpu(self).item();
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const auto stream = current_stream((is_late(self) ? self : dst).device().index());
  if (is_late(self) && is_late(dst) && self.device() != dst.device()) {
    synchronize(stream);
    synchronize(current_stream(dst.device().index()));
  }
  const auto& host = is_late(self) ? dst : self;
  const bool to_host = !is_late(dst), from_host = !is_late(self);
  const bool pinned = (to_host || from_host) && is_pinned(host.storage().data());
  at::Tensor from = from_host ? self : on_cpu(self), to = to_host ? dst : on_cpu(dst);
  if (from_host && !pinned) {  // a driver copies what it cannot read later
    from = at::empty(self.sizes(), self.options()).copy_(self);
  }
  if (to_host && pinned && non_blocking && at::isFloatingType(dst.scalar_type())) {
    BelowAutograd guard;
    dst.fill_(std::numeric_limits<double>::quiet_NaN());
  }
  enqueue(stream, [from, to, from_host, to_host]() mutable {
    BelowAutograd guard;
    if (!from_host) check_held(from);
    if (!to_host) check_held(to);
    to.copy_(from);
    from.reset();
    to.reset();
  });
  if ((to_host && !(pinned && non_blocking)) || (from_host && !non_blocking)) synchronize(stream);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.sizes() != self.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_late>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // As a function: with `out`, torch's kernel resizes that to the shape of the input, and back.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&run_late>());
  for (const auto* name : {"nonzero", "masked_select", "_unique2", "unique_dim", "equal",
                            "repeat_interleave.Tensor"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_synchronously>());
  }
}

void start_thread_state() {
  static const bool once = [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
  }();
  (void)once;
}

}  // namespace

extern "C" {

void late_register() { start_thread_state(); }

// Draws the lateness of all streams anew. Waits until each device is idle: other threads may submit
// to one queue while this waits for another, and what is cleared would never run.
void late_seed(uint64_t seed) {
  const Unlocked unlocked;
  auto& s = state();
  std::unique_lock lock(s.mutex);
  s.seed = seed;
  for (int i = 0; i < kDevices; ++i) {
    auto& device = s.devices[i];
    device.progress.wait(lock, [&] {
      return std::all_of(device.queues.begin(), device.queues.end(), [](const auto& each) {
        return each.second->completed >= each.second->submitted;
      });
    });
    device.queues.clear();
    device.random.seed(seed * kDevices + uint64_t(i));
  }
}

uint64_t late_synchronizations(long thread) {
  std::lock_guard lock(state().mutex);
  return state().synchronizations[thread];
}

uint64_t late_jobs() {
  std::lock_guard lock(state().mutex);
  return state().jobs;
}

// Makes streams ignore events, as a program without waits would have it; returns how many so far.
uint64_t late_ignore_waits(int ignore) {
  std::lock_guard lock(state().mutex);
  state().ignore_waits = ignore != 0;
  return state().ignored_waits;
}

// What a stream waits for until the host opens it.
void* late_gate() {
  auto* gate = new std::shared_ptr<Event>(new Event{0});
  (*gate)->recorded = 1;
  return gate;
}

void late_gate_wait(void* gate, int device, int64_t stream) {
  auto& s = state();
  std::lock_guard lock(s.mutex);
  const auto& event = *static_cast<std::shared_ptr<Event>*>(gate);
  submit(s, stream_of(c10::DeviceIndex(device), stream), Job{Job::kWait, nullptr, event, 1, {}});
}

void late_gate_open(void* gate) {
  auto* event = static_cast<std::shared_ptr<Event>*>(gate);
  {
    auto& s = state();
    std::lock_guard lock(s.mutex);
    (*event)->done = 1;
    for (auto& device : s.devices) device.work.notify_all();
  }
  delete event;
}

void late_stop() {
  const Unlocked unlocked;
  auto& s = state();
  {
    std::lock_guard lock(s.mutex);
    s.stopping = true;
    for (auto& device : s.devices) device.work.notify_all();
  }
  for (auto& device : s.devices) {
    if (device.thread.joinable()) device.thread.join();
  }
}
}

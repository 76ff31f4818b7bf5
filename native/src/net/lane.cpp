#include "lane.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

#include "codec_clock.h"

namespace wingbeat::net {

namespace {

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

double seconds_since(std::uint64_t ns) { return static_cast<double>(now_ns() - ns) * 1e-9; }

std::int64_t last_overlap(const std::vector<Transfer>& receives, const Transfer& chunk) {
  for (std::size_t i = receives.size(); i-- > 0;) {
    if (receives[i].start < chunk.stop && chunk.start < receives[i].stop) {
      return static_cast<std::int64_t>(i);
    }
  }
  return -1;
}

State state_of(const Operation& operation) {
  return operation.state.load(std::memory_order_acquire);
}

}  // namespace

std::uint64_t CastPacking::bytes(std::uint64_t start, std::uint64_t stop) const {
  return (stop - start) * size_of(to_);
}

void CastPacking::pack(std::uint8_t* buffer, std::uint64_t start, std::uint64_t stop,
                       std::uint8_t* out, bool result) const {
  auto* const part = reinterpret_cast<float*>(buffer) + start;
  narrow(to_, part, out, stop - start);
  if (result) widen(to_, out, part, stop - start, false);
}

const char* CastPacking::unpack(const std::uint8_t* chunk, std::uint8_t* buffer,
                                std::uint64_t start, std::uint64_t stop, bool add) const {
  widen(to_, chunk, reinterpret_cast<float*>(buffer) + start, stop - start, add);
  return nullptr;
}

void Completions::push(std::uint64_t number) {
  {
    const std::lock_guard lock(mutex_);
    numbers_.push_back(number);
  }
  changed_.notify_one();
}

std::vector<std::uint64_t> Completions::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return closed_ || !numbers_.empty(); });
  return std::exchange(numbers_, {});
}

void Completions::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

bool Task::wait(double seconds, bool sent) {
  const auto ended = [&] { return sent ? done_.load() : received_.load(); };
  if (ended()) return true;
  const std::uint64_t begin = now_ns();
  if (nic_ != nullptr && nic_->serve_until(ended, seconds)) return true;
  std::unique_lock lock(mutex_);
  return changed_.wait_for(
      lock, std::chrono::duration<double>(std::max(0.0, seconds - seconds_since(begin))), ended);
}

bool Task::report() {
  const std::lock_guard lock(mutex_);
  if (done_) return false;
  reported_ = true;
  return true;
}

void Task::end(bool failed, bool sent, Completions& completions) {
  bool report = false;
  {
    const std::lock_guard lock(mutex_);
    if (done_) return;
    if (!received_) received_ns = now_ns();
    failed_ = failed;
    received_ = true;
    done_ = sent;
    report = sent && reported_;
  }
  changed_.notify_all();
  if (nic_ != nullptr) nic_->interrupt();
  if (report) completions.push(number);
}

void Task::prepare(ScratchPool& pool) {
  memory_ = buffer;
  if (rows == 0) return;
  const std::size_t bytes = row_elements * size_of(dtype);
  gathered_ = pool.acquire(rows * bytes);
  memory_ = gathered_.get();
  std::memcpy(memory_ + own_row * bytes, buffer, bytes);
}

void Task::sum_rows() {
  const std::size_t bytes = row_elements * size_of(dtype);
  for (std::uint32_t i = 0; i < rows; ++i) {
    const std::uint8_t* const row = memory_ + i * bytes;
    if (i == 0) {
      std::memcpy(buffer, row, bytes);
    } else {
      add(dtype, buffer, row, row_elements);
    }
  }
}

Lane::Lane(std::vector<std::shared_ptr<Group>> links, std::uint16_t channel, std::size_t ahead,
           std::size_t depth, std::uint32_t chunks_per_tag,
           std::shared_ptr<Completions> completions, std::uint64_t number)
    : links_(std::move(links)),
      channel_(channel),
      ahead_(ahead),
      depth_(depth),
      chunks_per_tag_(chunks_per_tag),
      completions_(std::move(completions)),
      number_(number) {}

void Lane::submit(const std::shared_ptr<Task>& task) {
  Work work;
  bool starts_thread = false;
  {
    const std::lock_guard lock(mutex_);
    if (failed_) return task->end(true, true, *completions_);
    task->unsent_ = task->program->first.size();
    for (const auto& each : task->program->unlocks) task->unsent_ += each.size();
    const auto& receives = task->program->receives;
    const int link = receives.empty() ? 0 : receives.front().link;
    task->nic_ = links_[static_cast<std::size_t>(link)]->nic();
    queue_.push_back(task);
    if (task->slow()) {
      ++slow_tasks_;
      starts_thread = !std::exchange(has_thread_, true);
    }
    step_or_wake(work);
  }
  if (starts_thread) {
    try {
      std::thread([self = shared_from_this()] { self->run_thread(); }).detach();
    } catch (const std::system_error&) {
      fail();
      throw;
    }
  }
  work.run();
}

void Lane::progress(Work& work) {
  const std::lock_guard lock(mutex_);
  step_or_wake(work);
}

void Lane::step_or_wake(Work& work) {
  if (slow_tasks_ == 0) return step(work);
  awake_ = true;
  changed_.notify_all();
}

// Ends when the lane has failed, as it does when it is closed.
void Lane::run_thread() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return awake_ || stopping_ || failed_; });
    if (stopping_ || failed_) return;
    awake_ = false;
    Work work;
    step(work);
    lock.unlock();
    work.run();
    lock.lock();
  }
}

void Lane::step(Work& work) {
  while (!failed_ && !stopping_) {
    begin_more(work);
    finish_sent();
    if (troubled.exchange(false) && fail_if_lost(work)) return;
    if (active_.empty()) return;
    const auto task = active_.front();
    if (!task->complete()) {
      if (!advance(task, work)) return;
      for (const auto& later : active_) {
        if (later->after == task) release(*later, work);
      }
    }
    if (task->complete()) {
      task->sum_rows();
      task->end(false, false, *completions_);
      active_.pop_front();
      draining_.push_back(task);
      if (task->slow()) --slow_tasks_;
    }
  }
}

// The next task begins as soon as the previous one has sent its last chunk to the connection.
void Lane::begin_more(Work& work) {
  while (!stopping_ && !queue_.empty() && active_.size() < depth_) {
    if (!active_.empty() && active_.back()->unsent_ > 0) return;
    const auto task = std::move(queue_.front());
    queue_.pop_front();
    active_.push_back(task);
    task->begin_ns = now_ns();
    task->prepare(links_.front()->scratch());
    const auto& receives = task->program->receives;
    for (std::size_t i = 0; i < std::min(ahead_, receives.size()); ++i) {
      post_receive(*task, receives[i], work);
    }
    for (const Transfer& each : task->program->first) {
      const auto needs =
          task->after == nullptr ? -1 : last_overlap(task->after->program->receives, each);
      task->held_.push_back({needs, &each});
    }
    release(*task, work);
  }
}

void Lane::release(Task& task, Work& work) {
  while (!stopping_ && !task.held_.empty()) {
    const auto [needs, transfer] = task.held_.front();
    if (needs >= 0 && needs >= static_cast<std::int64_t>(task.after->applied_)) return;
    task.held_.pop_front();
    send(task, *transfer, work);
  }
}

bool Lane::advance(const std::shared_ptr<Task>& task, Work& work) {
  const auto& receives = task->program->receives;
  const std::size_t index = task->applied_;
  const OperationPtr operation = task->coming_.front();
  const State state = state_of(*operation);
  if (state == State::pending) {
    if (awaited_number_ != task->number || awaited_index_ != index || awaited_ns_ == 0) {
      awaited_number_ = task->number;
      awaited_index_ = index;
      awaited_ns_ = now_ns();
    }
    return false;
  }
  if (state == State::failed) {
    fail_at(*task, index, receives[index], operation->error, work);
    return false;
  }
  awaited_ns_ = 0;
  task->coming_.pop_front();
  if (const char* wrong = apply(*task, receives[index], *operation, work)) {
    fail_at(*task, index, receives[index],
            std::string("sent a malformed payload: ") + wrong +
                "; check that all ranks run the same version",
            work);
    return false;
  }
  ++task->applied_;
  if (index + ahead_ < receives.size()) post_receive(*task, receives[index + ahead_], work);
  for (const Transfer& each : task->program->unlocks[index]) {
    if (stopping_) return false;
    send(*task, each, work);
  }
  return !stopping_;
}

// Runs a slow packing without the lock, after what is to be written before it.
template <class Function>
void Lane::run_unlocked(Function run, Work& work) {
  unlocked_ = true;
  mutex_.unlock();
  work.run();
  run();
  mutex_.lock();
  unlocked_ = false;
  changed_.notify_all();
}

const char* Lane::apply(Task& task, const Transfer& transfer, Operation& operation, Work& work) {
  const std::size_t n = transfer.size();
  const char* wrong = nullptr;
  if (const Packing* const packing = task.packing_of(transfer)) {
    const auto unpack = [&] {
      wrong = packing->unpack(operation.data, task.memory_, transfer.start, transfer.stop,
                              transfer.reduce);
    };
    if (task.slow()) {
      run_unlocked([&] { codec_clock().run(CodecWork::unpack, n, unpack); }, work);
    } else {
      unpack();
    }
  } else if (transfer.reduce && !operation.summed) {
    add(task.dtype, task.memory_ + transfer.start * size_of(task.dtype), operation.data, n);
  }
  if (operation.scratch != nullptr) {
    links_[static_cast<std::size_t>(transfer.link)]->scratch().release(
        std::move(operation.scratch), operation.bytes);
  }
  return wrong;
}

OperationPtr Lane::operation(const Task& task, const Transfer& transfer) {
  auto made = std::make_shared<Operation>();
  const Packing* const packing = task.packing_of(transfer);
  made->bytes = packing != nullptr ? packing->bytes(transfer.start, transfer.stop)
                                   : transfer.size() * size_of(task.dtype);
  made->peer = transfer.peer;
  made->channel = channel_;
  made->tag = task.base_tag + transfer.tag % chunks_per_tag_;
  made->owner = shared_from_this();
  made->task = task.number;
  made->stays = packing == nullptr;
  return made;
}

void Lane::post_receive(Task& task, const Transfer& transfer, Work& work) {
  const auto made = operation(task, transfer);
  const Transfer& first = task.program->receives.front();
  task.in_order_ &= transfer.peer == first.peer && transfer.link == first.link;
  if (task.packing_of(transfer) == nullptr) {
    std::uint8_t* const elements = task.memory_ + transfer.start * size_of(task.dtype);
    if (!transfer.reduce) {
      made->data = elements;
    } else if (task.in_order_ && task.after == nullptr) {
      // Chunks arrive in the order of the program, and nothing else writes to the buffer.
      made->sum = elements;
      made->dtype = task.dtype;
    }
  }
  task.coming_.push_back(made);
  links_[static_cast<std::size_t>(transfer.link)]->receive(made, work);
}

void Lane::send(Task& task, const Transfer& transfer, Work& work) {
  Group& link = *links_[static_cast<std::size_t>(transfer.link)];
  const auto made = operation(task, transfer);
  if (task.packing_of(transfer) == nullptr) {
    made->data = task.memory_ + transfer.start * size_of(task.dtype);
  } else if (const auto known = task.results_.find(transfer.start); known != task.results_.end()) {
    made->data = known->second->data;  // the final result is packed only once
  } else {
    made->scratch = link.scratch().acquire(made->bytes);
    made->data = made->scratch.get();
    const bool result = task.own_start < transfer.stop && transfer.start < task.own_stop;
    pack(task, transfer, *made, result, work);
    if (result) task.results_[transfer.start] = made;
  }
  task.sends_.push_back({made, &transfer});
  --task.unsent_;
  link.send(made, work);
}

void Lane::pack(Task& task, const Transfer& transfer, Operation& operation, bool result,
                Work& work) {
  const auto run = [&] {
    task.packing->pack(task.memory_, transfer.start, transfer.stop, operation.data, result);
  };
  if (task.slow()) {
    run_unlocked([&] { codec_clock().run(CodecWork::pack, transfer.size(), run); }, work);
  } else {
    run();
  }
}

// Ends tasks, oldest first, whose chunks are all sent.
void Lane::finish_sent() {
  while (!draining_.empty()) {
    Task& task = *draining_.front();
    for (; !task.sends_.empty(); task.sends_.pop_front(), ++task.sent_) {
      const auto& [operation, transfer] = task.sends_.front();
      if (state_of(*operation) != State::done) return;
      // A result may be on its way to other peers too.
      const bool shared = task.results_.contains(transfer->start);
      if (operation->scratch != nullptr && !shared) {
        links_[static_cast<std::size_t>(transfer->link)]->scratch().release(
            std::move(operation->scratch), operation->bytes);
      }
    }
    for (const auto& link : links_) link->release_sources(this, task.number);
    for (auto& [start, operation] : task.results_) {
      links_.front()->scratch().release(std::move(operation->scratch), operation->bytes);
    }
    task.results_.clear();
    if (task.gathered_ != nullptr) {
      links_.front()->scratch().release(std::move(task.gathered_),
                                       task.rows * task.row_elements * size_of(task.dtype));
    }
    task.after.reset();
    task.end(false, true, *completions_);
    draining_.pop_front();
  }
}

// Fails the lane if a transfer has failed that is not yet awaited.
bool Lane::fail_if_lost(Work& work) {
  for (const auto* tasks : {&draining_, &active_}) {
    for (const auto& task : *tasks) {
      for (std::size_t i = 0; i < task->coming_.size(); ++i) {
        if (state_of(*task->coming_[i]) == State::failed) {
          const std::size_t index = task->applied_ + i;
          fail_at(*task, index, task->program->receives[index], task->coming_[i]->error, work);
          return true;
        }
      }
      for (const auto& [operation, transfer] : task->sends_) {
        if (state_of(*operation) == State::failed) {
          fail_at(*task, task->applied_, *transfer, operation->error, work);
          return true;
        }
      }
    }
  }
  return false;
}

void Lane::fail_at(const Task& task, std::uint64_t index, const Transfer& transfer,
                   const std::string& reason, Work& work) {
  const bool awaited = awaited_number_ == task.number && awaited_ns_ > 0;
  failure_ = {task.number,   index, transfer.peer,
              transfer.link, awaited ? seconds_since(awaited_ns_) : 0.0,
              reason};
  has_failure_ = true;
  end_all(work);
  completions_->push(number_);
}

void Lane::end_all(Work& work) {
  failed_ = true;
  for (const auto& link : links_) link->cancel(this, work);
  for (auto* tasks : {&draining_, &active_, &queue_}) {
    for (const auto& task : *tasks) {
      task->after.reset();
      task->coming_.clear();
      task->sends_.clear();
      task->results_.clear();
      task->end(true, true, *completions_);
    }
    tasks->clear();
  }
  changed_.notify_all();
}

void Lane::fail() {
  Work work;
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    changed_.wait(lock, [this] { return !unlocked_; });
    if (failed_) return;
    end_all(work);
  }
  work.run();
}

bool Lane::waiting(Waiting& found) {
  const std::lock_guard lock(mutex_);
  if (failed_ || unlocked_) return false;
  if (!active_.empty()) {
    const Task& task = *active_.front();
    const Transfer& transfer = task.program->receives[task.applied_];
    found = {task.number,   task.applied_, transfer.peer,
             transfer.link, awaited_ns_ > 0 ? seconds_since(awaited_ns_) : 0.0, {}};
    return true;
  }
  if (draining_.empty() || draining_.front()->sends_.empty()) return false;
  const Task& task = *draining_.front();
  const Transfer& transfer = *task.sends_.front().transfer;
  found = {task.number,   task.applied_ + task.sent_, transfer.peer,
           transfer.link, seconds_since(task.received_ns), {}};
  return true;
}

bool Lane::failure(Waiting& found) {
  const std::lock_guard lock(mutex_);
  if (has_failure_) found = failure_;
  return has_failure_;
}

}  // namespace wingbeat::net

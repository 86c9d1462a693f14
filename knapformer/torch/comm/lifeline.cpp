#include "knapformer/torch/comm/lifeline.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <random>
#include <sstream>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

constexpr char kGoodbye = 'B';

std::string address_key(int32_t rank) { return text("lifeline/", rank); }

void close_fd(int& fd) {
  if (fd >= 0) ::close(std::exchange(fd, -1));
}

/// The host that serves the store: the way to it leads over the network that ranks share.
std::string store_host(const c10::intrusive_ptr<c10d::Store>& store) {
  c10::intrusive_ptr<c10d::Store> inner = store;
  while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(inner.get())) inner = prefixed->getUnderlyingStore();
  const auto* tcp = dynamic_cast<c10d::TCPStore*>(inner.get());
  return tcp == nullptr ? "localhost" : tcp->getHost();
}

struct AddressList {
  addrinfo* first = nullptr;
  AddressList(const char* host, const char* port, int type, int flags) {
    addrinfo hints{};
    hints.ai_socktype = type;
    hints.ai_flags = flags;
    if (getaddrinfo(host, port, &hints, &first) != 0) first = nullptr;
  }
  ~AddressList() {
    if (first != nullptr) freeaddrinfo(first);
  }
};

/// The address of this host on the way to another. Nothing is sent.
std::string own_address(const std::string& to_host) {
  const AddressList list(to_host.c_str(), "9", SOCK_DGRAM, 0);
  for (const addrinfo* a = list.first; a != nullptr; a = a->ai_next) {
    int fd = ::socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_storage own{};
    socklen_t size = sizeof(own);
    char host[NI_MAXHOST] = "";
    const bool found =
        fd >= 0 && ::connect(fd, a->ai_addr, a->ai_addrlen) == 0 &&
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
        ::getnameinfo(reinterpret_cast<sockaddr*>(&own), size, host, sizeof(host), nullptr, 0, NI_NUMERICHOST) == 0;
    close_fd(fd);
    if (found) return host;
  }
  return "127.0.0.1";
}

/// The listening socket, or -1 where there can be none. Sets `port` to the one that it listens on.
int listen_at(const std::string& host, std::string& port) {
  const AddressList list(host.c_str(), "0", SOCK_STREAM, AI_NUMERICHOST);
  if (list.first == nullptr) return -1;
  int fd = ::socket(list.first->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  char service[NI_MAXSERV] = "";
  const bool listens =
      fd >= 0 && ::bind(fd, list.first->ai_addr, list.first->ai_addrlen) == 0 && ::listen(fd, 8) == 0 &&
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
      ::getnameinfo(reinterpret_cast<sockaddr*>(&own), size, nullptr, 0, service, sizeof(service), NI_NUMERICSERV) == 0;
  if (!listens) close_fd(fd);
  port = service;
  return fd;
}

int start_connecting(const std::string& host, const std::string& port) {
  const AddressList list(host.c_str(), port.c_str(), SOCK_STREAM, AI_NUMERICHOST | AI_NUMERICSERV);
  if (list.first == nullptr) return -1;
  int fd = ::socket(list.first->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  const auto set = [&](int level, int name, int value) { ::setsockopt(fd, level, name, &value, sizeof(value)); };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 2);   // seconds
  set(IPPROTO_TCP, TCP_KEEPINTVL, 2);  // seconds
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  if (::connect(fd, list.first->ai_addr, list.first->ai_addrlen) != 0 && errno != EINPROGRESS) close_fd(fd);
  return fd;
}

}  // namespace

Lifeline::Lifeline(c10::intrusive_ptr<c10d::Store> store, int32_t rank, int32_t num_ranks,
                   std::function<void(int32_t)> on_end)
    : store_(std::move(store)), rank_(rank), next_((rank + 1) % num_ranks), on_end_(std::move(on_end)) {
  std::random_device random;
  number_ = uint64_t{random()} << 32 | random();
  const std::string host = own_address(store_host(store_));
  std::string port;
  listener_ = listen_at(host, port);
  if (listener_ >= 0) store_->set(address_key(rank_), text(host, ' ', port, ' ', number_));
}

void Lifeline::connect() {
  if (store_->check({address_key(next_)})) {
    std::istringstream address(store_->get_to_str(address_key(next_)));
    std::string host, port;
    address >> host >> port >> next_number_;
    to_next_ = start_connecting(host, port);
  }
  wake_ = ::eventfd(0, EFD_CLOEXEC);
  if (wake_ >= 0 && (listener_ >= 0 || to_next_ >= 0)) thread_ = std::thread([this] { run(); });
}

void Lifeline::withdraw_address() {
  if (listener_ >= 0) store_->deleteKey(address_key(rank_));
}

void Lifeline::run() {
  for (;;) {
    std::vector<pollfd> fds = {{.fd = wake_, .events = POLLIN, .revents = 0},
                               {.fd = listener_, .events = POLLIN, .revents = 0},
                               {.fd = to_next_, .events = POLLIN, .revents = 0}};  // poll skips descriptors below 0
    if (::poll(fds.data(), fds.size(), -1) < 0) {
      if (errno == EINTR) continue;
      return;
    }
    if (fds[0].revents != 0) return;
    if (fds[1].revents != 0) accept_peer();
    if (fds[2].revents != 0 && !hear_next()) close_fd(to_next_);
  }
}

void Lifeline::accept_peer() {
  const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd < 0) {
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) close_fd(listener_);
    return;
  }
  static_cast<void>(::send(fd, &number_, sizeof(number_), MSG_NOSIGNAL));
  from_previous_.push_back(fd);
}

bool Lifeline::hear_next() {
  if (!is_known_) {
    uint64_t number = 0;
    is_known_ = ::recv(to_next_, &number, sizeof(number), MSG_DONTWAIT) == sizeof(number) && number == next_number_;
    return is_known_;
  }
  char byte = 0;
  const ssize_t count = ::recv(to_next_, &byte, 1, MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (count != 1 || byte != kGoodbye) on_end_(next_);
  return false;
}

Lifeline::~Lifeline() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    static_cast<void>(!::write(wake_, &one, sizeof(one)));
    thread_.join();
  }
  for (const int fd : from_previous_) static_cast<void>(::send(fd, &kGoodbye, 1, MSG_NOSIGNAL));
  for (int* fd : {&listener_, &to_next_, &wake_}) close_fd(*fd);
  for (int fd : from_previous_) close_fd(fd);
}

}  // namespace knapformer

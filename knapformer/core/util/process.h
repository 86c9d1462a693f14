// Ownership of objects that have threads, in processes that fork.
#pragma once

#include <unistd.h>

#include <memory>

namespace knapformer {

/// A child process that is forked from this one does not have its threads. There the object is never deleted, so
/// nothing waits for those threads.
template <class T>
std::shared_ptr<T> owned_by_this_process(std::unique_ptr<T> owned) {
  return {owned.release(), [process = ::getpid()](T* thing) {
            if (process == ::getpid()) delete thing;
          }};
}

}  // namespace knapformer

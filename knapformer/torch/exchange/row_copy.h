// Copies of rows between buffers of two strides, of which the CPU engine is made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace knapformer {

struct RowCopy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  int64_t from_stride = 0;  // bytes, as the following
  int64_t to_stride = 0;
  int64_t width = 0;
  int64_t num_rows = 0;
};

/// A list of copies that do not overlap, run on ATen's threads.
class CopyList {
 public:
  void add(const RowCopy& copy);
  void run() const;

 private:
  std::vector<RowCopy> copies_;
  int64_t num_bytes_ = 0;
};

}  // namespace knapformer

#ifndef XLA_PLUGIN_BASE_SHARED_LIST_H_
#define XLA_PLUGIN_BASE_SHARED_LIST_H_

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

namespace jaxhet {

// A list that never changes. Copies share it.
template <typename T>
class SharedList {
 public:
  SharedList() = default;
  // NOLINTBEGIN(google-explicit-constructor,misc-explicit-constructor): a vector converts
  SharedList(std::vector<T> items)
      : items_(std::make_shared<const std::vector<T>>(std::move(items))) {}
  SharedList(std::initializer_list<T> items) : SharedList(std::vector<T>(items)) {}
  // NOLINTEND(google-explicit-constructor,misc-explicit-constructor)

  const T* begin() const { return items_ ? items_->data() : nullptr; }
  const T* end() const { return begin() + size(); }
  size_t size() const { return items_ ? items_->size() : 0; }
  bool empty() const { return size() == 0; }

 private:
  std::shared_ptr<const std::vector<T>> items_;
};

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_SHARED_LIST_H_

#include "xla_plugin/net/socket/records.h"

#include <algorithm>
#include <cstring>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet {

size_t RecordWriter::Add(const IoList& bytes, size_t offset) {
  const size_t num_bytes = std::min(kMostRecordBytes, bytes.num_bytes() - offset);
  if (num_bytes == 0) return 0;
  const RecordInfo info{CheckedCast<uint32_t>(num_bytes)};
  record_.resize(sizeof info + num_bytes + Seal::kTagBytes);
  sent_ = 0;
  const auto head = std::span(record_).first<sizeof info>();
  const auto body = std::span(record_).subspan(sizeof info, num_bytes);
  std::memcpy(head.data(), &info, sizeof info);
  bytes.CopyOut(offset, body);
  seal_.SealNext(head, body, std::span(record_).last<Seal::kTagBytes>());
  return num_bytes;
}

size_t RecordReader::Take(std::span<const iovec> entries) {
  if (opened_.empty() && !OpenNext()) return 0;
  const iovec opened = ToIovec(opened_.data(), opened_.size());
  const size_t num_bytes = CopyEntries(entries, {&opened, 1});
  opened_ = opened_.subspan(num_bytes);
  return num_bytes;
}

bool RecordReader::OpenNext() {
  RecordInfo info{};
  const auto arrived = std::span(buffer_).subspan(begin_, end_ - begin_);
  if (arrived.size() < sizeof info) return false;
  std::memcpy(&info, arrived.data(), sizeof info);
  if (info.num_bytes == 0 || info.num_bytes > kMostRecordBytes) {
    Throw(ErrorCode::kTransport, "a record announces ", info.num_bytes,
          " bytes: it was changed on its way, or the peer does not encrypt; start every process "
          "with the same JAXHET_ENCRYPTION");
  }
  const size_t sealed_bytes = sizeof info + info.num_bytes + Seal::kTagBytes;
  if (arrived.size() < sealed_bytes) return false;
  const auto body = arrived.subspan(sizeof info, info.num_bytes);
  seal_.OpenNext(arrived.first<sizeof info>(), body,
                 arrived.first(sealed_bytes).last<Seal::kTagBytes>());
  begin_ += sealed_bytes;
  opened_ = body;
  return true;
}

iovec RecordReader::Room() {
  if (begin_ == end_) begin_ = end_ = 0;
  if (buffer_.size() - begin_ < kMostSealedBytes) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  return ToIovec(buffer_.data() + end_, buffer_.size() - end_);
}

}  // namespace jaxhet

#include "xla_plugin/engine/plans.h"

#include <algorithm>

#include "xla_plugin/base/strings.h"

namespace jaxhet {
namespace {

// Takes the first line off `text`.
std::string_view TakeLine(std::string_view& text) {
  const size_t end = std::min(text.find('\n'), text.size());
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return line;
}

std::string_view Compared(std::string_view line) { return line.substr(0, line.find('\t')); }

std::string_view Description(std::string_view line) {
  const size_t tab = line.find('\t');
  return tab == std::string_view::npos ? line : line.substr(tab + 1);
}

std::string Readable(std::string_view line, bool exists) {
  if (!exists) return "(no more exchanges)";
  const bool described = line.find('\t') != std::string_view::npos;
  return described ? StrCat(Compared(line), " (", Description(line), ")") : std::string(line);
}

}  // namespace

const std::string* Plans::Find(int64_t plan) const {
  const auto found = texts_.find(plan);
  return found == texts_.end() ? nullptr : &found->second;
}

std::string Plans::Describe(int64_t plan, int64_t index) const {
  std::string name = StrCat("exchange ", index);
  const std::string* const text = Find(plan);
  if (text == nullptr) return name;
  std::string_view rest = *text;
  for (int64_t line = 0; line < index; ++line) TakeLine(rest);
  const std::string_view description = Description(TakeLine(rest));
  return description.empty() ? name : StrCat(name, " (", description, ")");
}

PlanDifference FirstDifference(std::string_view ours, std::string_view theirs) {
  for (int64_t line = 0;; ++line) {
    const bool we_have = !ours.empty();
    const bool they_have = !theirs.empty();
    const std::string_view our_line = TakeLine(ours);
    const std::string_view their_line = TakeLine(theirs);
    if (we_have && they_have && Compared(our_line) == Compared(their_line)) continue;
    return {line, Readable(our_line, we_have), Readable(their_line, they_have)};
  }
}

}  // namespace jaxhet

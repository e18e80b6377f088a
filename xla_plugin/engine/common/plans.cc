#include "xla_plugin/engine/common/plans.h"

#include <algorithm>

#include "xla_plugin/base/strings.h"

namespace jaxhet {
namespace {

constexpr int kShownEquations = 3;
// The longest parts of an equation's line that an error shows, in bytes of UTF-8.
constexpr size_t kEquationBytes = 300;
constexpr size_t kEquationSourceBytes = 150;

// Takes the first line off `text`.
std::string_view TakeLine(std::string_view& text) {
  const size_t end = std::min(text.find('\n'), text.size());
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return line;
}

std::string_view FirstLine(std::string_view text) { return TakeLine(text); }

std::string_view Compared(std::string_view line) { return line.substr(0, line.find('\t')); }

// The description; empty if the line has none.
std::string_view Description(std::string_view line) {
  const size_t tab = line.find('\t');
  return tab == std::string_view::npos ? std::string_view() : line.substr(tab + 1);
}

std::string Readable(std::string_view compared, std::string_view description) {
  return description.empty() ? std::string(compared) : StrCat(compared, " (", description, ")");
}

std::string ReadableExchange(std::string_view rest) {
  if (rest.empty()) return "(no more exchanges)";
  const std::string_view line = TakeLine(rest);
  return Readable(Compared(line), Description(line));
}

// Cuts between two characters.
std::string Shortened(std::string_view text, size_t num_bytes) {
  if (text.size() <= num_bytes) return std::string(text);
  const auto continues_character = [&](size_t i) {
    return (static_cast<unsigned char>(text[i]) & 0xC0U) == 0x80U;
  };
  while (num_bytes > 0 && continues_character(num_bytes)) --num_bytes;
  return StrCat(text.substr(0, num_bytes), "…");
}

std::string ReadableEquation(std::string_view line) {
  const std::string source = Shortened(Description(line), kEquationSourceBytes);
  return Readable(Shortened(Compared(line), kEquationBytes - source.size()), source);
}

// The first equations of `rest`, of which the first has that number.
std::string ReadableEquations(int64_t number, std::string_view rest) {
  std::string text;
  for (int i = 0; i < kShownEquations; ++i) {
    if (rest.empty()) return StrCat(text, "\n    (no more equations)");
    text += StrCat("\n    ", number + i, ": ", ReadableEquation(TakeLine(rest)));
  }
  return text;
}

std::string DescribeExchanges(const PlanSide& ours, const PlanSide& theirs,
                              const TextDifference& difference) {
  return StrCat("Exchange ", difference.line, " is the first that differs.\n  ", ours.rank, ": ",
                ReadableExchange(difference.ours), "\n  ", theirs.rank, ": ",
                ReadableExchange(difference.theirs), "\n");
}

std::string DescribeNames(const Plan& ours, const Plan& theirs) {
  const std::string_view our_name = ours.program_name();
  const std::string_view their_name = theirs.program_name();
  if (our_name == their_name) return StrCat("another program of the same name, ", our_name);
  return StrCat("another program: ", their_name, ", but this rank runs ", our_name);
}

// Description of two listings that differ.
std::string DescribeListings(const PlanSide& ours, const PlanSide& theirs) {
  std::string_view our_equations = ours.plan.program;
  std::string_view their_equations = theirs.plan.program;
  const std::string_view our_title = TakeLine(our_equations);
  const std::string_view their_title = TakeLine(their_equations);
  const TextDifference difference = FirstDifference(our_equations, their_equations);
  if (!difference.exists()) {
    return StrCat("The digest of the program is the first that differs.\n  ", ours.rank, ": ",
                  our_title, "\n  ", theirs.rank, ": ", their_title, "\n");
  }
  return StrCat("Equation ", difference.line, " is the first that differs.\n  ", ours.rank, ":",
                ReadableEquations(difference.line, difference.ours), "\n  ", theirs.rank, ":",
                ReadableEquations(difference.line, difference.theirs), "\n");
}

}  // namespace

std::string_view Plan::program_name() const {
  const std::string_view title = FirstLine(program);
  return title.substr(0, title.find(' '));
}

void Plans::Add(int64_t plan, std::string_view text, std::string_view program) {
  const bool has_open_line = !text.empty() && !text.ends_with('\n');
  const int64_t num_exchanges = std::ranges::count(text, '\n') + (has_open_line ? 1 : 0);
  plans_[plan] =
      std::make_shared<const Plan>(Plan{std::string(text), std::string(program), num_exchanges});
}

std::shared_ptr<const Plan> Plans::Share(int64_t plan) const {
  const auto found = plans_.find(plan);
  return found == plans_.end() ? nullptr : found->second;
}

std::string Plans::Describe(int64_t plan, int64_t index) const {
  std::string name = StrCat("exchange ", index);
  const Plan* const found = Find(plan);
  if (found == nullptr) return name;
  std::string_view rest = found->text;
  for (int64_t line = 0; line < index && !rest.empty(); ++line) TakeLine(rest);
  const std::string_view line = TakeLine(rest);
  const std::string_view description = Description(line);
  return Readable(name, description.empty() ? Compared(line) : description);
}

std::string Plans::DescribeWithProgram(int64_t plan, int64_t index) const {
  std::string text = Describe(plan, index);
  const Plan* const found = Find(plan);
  if (found == nullptr || found->program.empty()) return text;
  return StrCat(text, " of ", found->program_name());
}

TextDifference FirstDifference(std::string_view ours, std::string_view theirs) {
  TextDifference difference{.line = 0, .ours = ours, .theirs = theirs};
  while (!ours.empty() && !theirs.empty() &&
         Compared(TakeLine(ours)) == Compared(TakeLine(theirs))) {
    difference = {.line = difference.line + 1, .ours = ours, .theirs = theirs};
  }
  return difference;
}

std::string DescribeMismatch(const PlanSide& ours, const PlanSide& theirs) {
  const std::string& our_program = ours.plan.program;
  const std::string& their_program = theirs.plan.program;
  const TextDifference exchanges = FirstDifference(ours.plan.text, theirs.plan.text);
  const bool are_listed = !our_program.empty() && !their_program.empty();
  if (!are_listed || !FirstDifference(our_program, their_program).exists()) {
    return StrCat(" runs another program. ", DescribeExchanges(ours, theirs, exchanges),
                  "Run the same program, with the same shapes, on all ranks in the same order.");
  }
  return StrCat(" runs ", DescribeNames(ours.plan, theirs.plan), ". ",
                DescribeListings(ours, theirs),
                exchanges.exists() ? DescribeExchanges(ours, theirs, exchanges) : "",
                "Run the same programs in the same order on all ranks. Put code that differs "
                "between platforms on purpose into jaxhet.per_platform.");
}

}  // namespace jaxhet

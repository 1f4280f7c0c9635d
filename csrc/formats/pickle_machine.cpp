#include "formats/pickle_machine.h"

#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

#include "formats/format_error.h"
#include "formats/graph_builder.h"
#include "formats/pickle_bytes.h"
#include "formats/text_forms.h"

namespace ds::formats {
namespace {

constexpr Ref kMark = kNoRef;
constexpr size_t kLongestNumber = 4000;  // characters of a decimal number: longer ones take quadratic time
constexpr size_t kLongestName = 1 << 20, kLongestText = 1 << 30;
constexpr int kHighestProtocol = 5;

class Run {
 public:
  Run(std::string_view data, NameResolver& names, const std::function<void(const StoredMemory&)>& check_storage,
      uint64_t position)
      : in_(data, position), names_(names), build_(data.size(), check_storage) {}

  uint64_t position() const { return in_.position(); }

  PickleGraph run() {
    while (true) {
      const uint8_t code = in_.byte();
      build_.at(position());
      if (code == '.') {
        const Ref root = pop();
        PickleGraph graph = build_.take();
        graph.root = root;
        return graph;
      }
      if (!constant(code) && !number(code) && !text(code) && !stack(code) && !container(code) && !object(code)) {
        damaged<DamagedPickle>("damaged pickle at byte ", position(), ": no opcode ", static_cast<int>(code));
      }
    }
  }

 private:
  // ---- the stack and the memo
  uint64_t memo_line() {
    bool fits;
    int64_t value;
    need(decimal(in_.line(32), &fits, &value) && fits && value >= 0, "no number of the memo");
    return static_cast<uint64_t>(value);
  }

  void push(Ref ref) { stack_.push_back(ref); }

  Ref top() const {
    need(!stack_.empty(), "pop from empty list");
    need(stack_.back() != kMark, "a value is missing");
    return stack_.back();
  }

  Ref pop() {
    const Ref found = top();
    stack_.pop_back();
    return found;
  }

  std::vector<Ref> since_mark() {
    size_t mark = stack_.size();
    while (mark > 0 && stack_[mark - 1] != kMark) --mark;
    need(mark > 0, "a mark is missing");
    std::vector<Ref> items(stack_.begin() + static_cast<std::ptrdiff_t>(mark), stack_.end());
    stack_.resize(mark - 1);
    return items;
  }

  void put(uint64_t index) {
    const Ref value = top();
    // Honest files count up; numbers out of thin air must not make a table of billions.
    if (index < memo_.size()) {
      memo_[index] = value;
    } else if (index == memo_.size()) {
      memoised_ += far_memo_.erase(index) == 0 ? 1 : 0;
      memo_.push_back(value);
    } else {
      memoised_ += far_memo_.insert_or_assign(index, value).second ? 1 : 0;
    }
  }

  Ref remembered(uint64_t index) const {
    if (index < memo_.size()) return memo_[index];
    const auto found = far_memo_.find(index);
    if (found == far_memo_.end()) throw Complaint("no " + std::to_string(index) + " in the memo");
    return found->second;
  }

  // ---- opcodes: each function knows some, and says whether it knew this one
  bool constant(uint8_t code) {
    switch (code) {
      case 'N': push(build_.none()); return true;
      case 0x88: push(build_.boolean(true)); return true;
      case 0x89: push(build_.boolean(false)); return true;
      case ']': push(build_.list({})); return true;
      case '}': push(build_.dict({})); return true;
      case ')': push(build_.tuple(nullptr, 0)); return true;
      case 0x8f: push(build_.set({})); return true;
      case '(': push(kMark); return true;
      default: return false;
    }
  }

  bool number(uint8_t code) {
    switch (code) {
      case 'I':
      case 'L': push(decimal_line()); return true;
      case 'J': push(build_.integer(in_.little<int32_t>())); return true;
      case 'K': push(build_.integer(in_.little<uint8_t>())); return true;
      case 'M': push(build_.integer(in_.little<uint16_t>())); return true;
      case 0x8a: push(long_integer(in_.little<uint8_t>())); return true;
      case 0x8b: push(long_integer(in_.signed_size())); return true;
      case 'F': {
        double value;
        need(floating(in_.line(kLongestNumber), &value), "no number");
        push(build_.real(value));
        return true;
      }
      case 'G': {
        const std::string_view bytes = in_.take(8);
        uint64_t bits = 0;
        for (const char c : bytes) bits = bits << 8 | static_cast<uint8_t>(c);
        double value;
        std::memcpy(&value, &bits, sizeof(value));
        push(build_.real(value));
        return true;
      }
      default: return false;
    }
  }

  Ref decimal_line() {
    std::string_view text = in_.line(kLongestNumber);
    if (text == "00" || text == "01") return build_.boolean(text == "01");
    while (!text.empty() && text.back() == 'L') text.remove_suffix(1);
    bool fits;
    int64_t value;
    need(decimal(text, &fits, &value), "invalid literal for a number");
    return fits ? build_.integer(value) : build_.text(Kind::kDecimal, text);
  }

  Ref long_integer(uint64_t size) {
    const std::string_view bytes = in_.take(size);
    if (size > 8) return build_.text(Kind::kBigInt, bytes);
    uint64_t value = size > 0 && (bytes.back() & 0x80) != 0 ? ~uint64_t{0} : 0;
    for (size_t i = size; i-- > 0;) value = value << 8 | static_cast<uint8_t>(bytes[i]);
    return build_.integer(static_cast<int64_t>(value));
  }

  Ref utf8(std::string_view bytes, bool surrogates) {
    need(is_utf8(bytes, surrogates), "text that is not UTF-8");
    return build_.text(Kind::kText, bytes);
  }

  bool text(uint8_t code) {
    switch (code) {
      case 'S': {
        std::string bytes;
        need(unquoted(in_.line(kLongestText), &bytes), "a string without quotes");
        need(is_utf8(bytes, false), "text that is not UTF-8");
        push(build_.owned_text(Kind::kText, std::move(bytes)));
        return true;
      }
      case 'T': push(utf8(in_.take(in_.signed_size()), false)); return true;
      case 'U': push(utf8(in_.take(in_.little<uint8_t>()), false)); return true;
      case 'V': {
        std::string found;
        need(raw_unicode_of(in_.line(kLongestText), &found), "text with a broken escape");
        push(build_.owned_text(Kind::kText, std::move(found)));
        return true;
      }
      case 'X': push(utf8(in_.take(in_.little<uint32_t>()), true)); return true;
      case 0x8c: push(utf8(in_.take(in_.little<uint8_t>()), true)); return true;
      case 0x8d: push(utf8(in_.take(in_.little<uint64_t>()), true)); return true;
      case 'B': push(build_.text(Kind::kBytes, in_.take(in_.little<uint32_t>()))); return true;
      case 'C': push(build_.text(Kind::kBytes, in_.take(in_.little<uint8_t>()))); return true;
      case 0x8e: push(build_.text(Kind::kBytes, in_.take(in_.little<uint64_t>()))); return true;
      case 0x96: push(build_.text(Kind::kByteArray, in_.take(in_.little<uint64_t>()))); return true;
      default: return false;
    }
  }

  bool stack(uint8_t code) {
    switch (code) {
      case 'h': push(remembered(in_.little<uint8_t>())); return true;
      case 'j': push(remembered(in_.little<uint32_t>())); return true;
      case 'g': push(remembered(memo_line())); return true;
      case 'q': put(in_.little<uint8_t>()); return true;
      case 'r': put(in_.little<uint32_t>()); return true;
      case 'p': put(memo_line()); return true;
      case 0x94: put(memoised_); return true;
      case '2': push(top()); return true;
      case '0':
        need(!stack_.empty(), "pop from empty list");
        stack_.pop_back();
        return true;
      case '1': since_mark(); return true;
      case 0x80: {
        const int version = in_.byte();
        if (version > kHighestProtocol) throw Complaint("protocol " + std::to_string(version));
        return true;
      }
      case 0x95: {
        const uint64_t frame = in_.little<uint64_t>();
        need(frame <= in_.left(), "a frame is cut off");
        return true;
      }
      default: return false;
    }
  }

  bool container(uint8_t code) {
    switch (code) {
      case 't': {
        const std::vector<Ref> items = since_mark();
        push(build_.tuple(items.data(), items.size()));
        return true;
      }
      case 0x85: push_tuple(1); return true;
      case 0x86: push_tuple(2); return true;
      case 0x87: push_tuple(3); return true;
      case 'l': push(build_.list(since_mark())); return true;
      case 'd': push(build_.dict(since_mark())); return true;
      case 0x91: {
        const std::vector<Ref> items = since_mark();
        push(build_.tuple(items.data(), items.size(), Kind::kFrozenSet));
        return true;
      }
      case 'a': {
        const Ref item = pop();
        build_.extend(top(), &item, 1);
        return true;
      }
      case 'e': {
        const std::vector<Ref> items = since_mark();
        build_.extend(top(), items.data(), items.size());
        return true;
      }
      case 's': {
        const Ref value = pop();
        const Ref pair[] = {pop(), value};
        build_.set_items(top(), pair, 2);
        return true;
      }
      case 'u': {
        const std::vector<Ref> items = since_mark();
        build_.set_items(top(), items.data(), items.size());
        return true;
      }
      case 0x90: {
        const std::vector<Ref> items = since_mark();
        build_.add_items(top(), items.data(), items.size());
        return true;
      }
      default: return false;
    }
  }

  void push_tuple(size_t count) {
    std::vector<Ref> items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    push(build_.tuple(items.data(), count));
  }

  bool object(uint8_t code) {
    switch (code) {
      case 'c': {
        const std::string module(in_.line(kLongestName)), name(in_.line(kLongestName));
        push(find(module, name));
        return true;
      }
      case 0x93: {
        const Ref name = pop(), module = pop();
        need(build_.is(name, Kind::kText) && build_.is(module, Kind::kText), "a global whose name is not text");
        push(find(std::string(build_.text_of(module)), std::string(build_.text_of(name))));
        return true;
      }
      case 'R': {
        const Ref arguments = pop();
        call(Call::kReduce, pop(), arguments, kMark);
        return true;
      }
      case 0x81: {
        const Ref arguments = pop();
        call(Call::kNew, pop(), arguments, kMark);
        return true;
      }
      case 0x92: {
        const Ref keywords = pop(), arguments = pop();
        need(build_.is(keywords, Kind::kDict), "arguments that are not a tuple");
        call(Call::kNewWithKeywords, pop(), arguments, keywords);
        return true;
      }
      case 'i': {
        const std::string module(in_.line(kLongestName)), name(in_.line(kLongestName));
        const Ref function = find(module, name);
        const std::vector<Ref> items = since_mark();
        push(build_.call(Call::kReduce, function, items.data(), items.size()));
        return true;
      }
      case 'o': {
        const std::vector<Ref> items = since_mark();
        need(!items.empty(), "an object without a class");
        push(build_.call(Call::kReduce, items[0], items.data() + 1, items.size() - 1));
        return true;
      }
      case 'b': {
        const Ref state = pop();
        build_.build(top(), state);
        return true;
      }
      case 'Q': push(persistent(pop())); return true;
      case 0x82:
      case 0x83:
      case 0x84: refuse("a code of the extension registry");
      case 0x97:
      case 0x98: refuse("a buffer outside of the file");
      case 'P': refuse("a persistent id in words");
      default: return false;
    }
  }

  [[noreturn]] void refuse(const char* what) const {
    damaged<DamagedPickle>(what, " at byte ", position(), " of the pickle: no checkpoint has these");
  }

  Ref find(std::string module, std::string name) {
    const auto printable = [](const std::string& text) {
      return is_utf8(text, false) && text.find('\0') == std::string::npos;
    };
    need(printable(module) && printable(name), "a global whose name is not text");
    modernise(&module, &name);
    const std::string full = module + '\n' + name;  // neither has a line end of its own where it matters
    const auto known = found_.find(full);
    if (known != found_.end()) return known->second;
    const Ref made = build_.global(names_.find(module, name));
    found_.emplace(full, made);
    return made;
  }

  void call(Call call, Ref function, Ref arguments, Ref keywords) {
    need(build_.is(arguments, Kind::kTuple), "arguments that are not a tuple");
    const Ref* parts = build_.graph().parts_of(arguments);
    std::vector<Ref> items(parts, parts + build_.node(arguments).count);
    if (keywords != kMark) items.push_back(keywords);
    push(build_.call(call, function, items.data(), items.size()));
  }

  // ("storage", class of storages, key, where it was, elements), in old files with what part of a storage it is.
  Ref persistent(Ref id) {
    const Node& tuple = build_.node(id);
    if (tuple.kind != Kind::kTuple || (tuple.count != 5 && tuple.count != 6))
      refuse_id("a persistent id that is not a storage");
    const Ref* part = build_.graph().parts_of(id);
    const bool says = build_.is(part[0], Kind::kText) || build_.is(part[0], Kind::kBytes);
    if (!says || build_.text_of(part[0]) != "storage") refuse_id("a persistent id that is not a storage");
    if (!build_.is(part[1], Kind::kGlobal) || build_.global_of(part[1]).use != NameUse::kStorage ||
        !build_.is(part[2], Kind::kText) || !build_.is(part[3], Kind::kText) || !build_.is_integer(part[4])) {
      refuse_id("a storage of another kind");
    }
    StoredMemory memory;
    memory.key = std::string(build_.text_of(part[2]));
    memory.element = build_.global_of(part[1]).element;
    memory.numel = build_.is(part[4], Kind::kInt) ? build_.node(part[4]).number : -1;
    const bool part_of_another = tuple.count == 6 && !build_.is(part[5], Kind::kNone);
    const bool countable = memory.numel >= 0 && memory.numel < std::numeric_limits<int64_t>::max() / 16;
    if (build_.text_of(part[3]) == "meta" || !countable || part_of_another) {
      damaged<DamagedPickle>("the storage '", memory.key, "' has no values");
    }
    return build_.storage(std::move(memory));
  }

  [[noreturn]] static void refuse_id(const char* what) { throw DamagedPickle(what); }

  PickleBytes in_;
  NameResolver& names_;
  GraphBuilder build_;
  std::vector<Ref> stack_;
  std::vector<Ref> memo_;
  std::unordered_map<uint64_t, Ref> far_memo_;
  uint64_t memoised_ = 0;
  std::unordered_map<std::string, Ref> found_;  // globals
};

void no_storages(const StoredMemory& memory) {
  damaged<DamagedPickle>("the storage '", memory.key, "' is in no archive");
}

}  // namespace

PickleMachine::PickleMachine(std::string_view data, NameResolver& names,
                             std::function<void(const StoredMemory&)> check_storage)
    : data_(data), names_(names), check_storage_(check_storage ? std::move(check_storage) : no_storages) {}

PickleGraph PickleMachine::read(uint64_t* position) {
  Run run(data_, names_, check_storage_, *position);
  try {
    PickleGraph graph = run.run();
    *position = run.position();
    return graph;
  } catch (const Complaint& complaint) {
    damaged<DamagedPickle>("damaged pickle at byte ", run.position(), ": ", complaint.what());
  } catch (const std::bad_alloc&) {
    damaged<DamagedPickle>("the pickle asks for too much at byte ", run.position());
  }
}

}  // namespace ds::formats

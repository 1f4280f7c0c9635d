// Forms of text and numbers in pickles.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace ds::formats {

// Lone surrogates, as three bytes each, pass only where `surrogates` says so.
bool is_utf8(std::string_view bytes, bool surrogates);

// UTF-8 as latin-1; false for characters beyond it.
bool latin1_of(std::string_view utf8, std::string* bytes);

// Python's raw-unicode-escape (\uXXXX and \UXXXXXXXX, everything else latin-1) as UTF-8; false for a broken escape.
bool raw_unicode_of(std::string_view line, std::string* utf8);

// A quoted string of Python with its escapes, as bytes; false for quotes or escapes that are broken.
bool unquoted(std::string_view line, std::string* bytes);

// A decimal number as int() reads it; *fits says whether it has at most 64 bits and is in *value. False for no number.
bool decimal(std::string_view text, bool* fits, int64_t* value);

// As float() reads it.
bool floating(std::string_view text, double* value);

}  // namespace ds::formats

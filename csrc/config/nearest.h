// "Did you mean": edit distance with transpositions, and the nearest of some words.
#pragma once
#include <string>
#include <vector>

namespace ds::config {

// Insertions, deletions, replacements and swaps of neighbours (optimal string alignment), case-insensitive.
int edit_distance(const std::string& a, const std::string& b);

// The candidate that `word` was most likely meant to be, or "" when none is near: within max(2, a third of its
// length) edits and with half of its letters (one edit where one of the two has at most four letters), or one containing
// the other's words. Ties go to the first.
std::string nearest(const std::string& word, const std::vector<std::string>& candidates);

// Whether `word` is a typing error of `known`, and not a word of its own: two edits, one where `known` has at most six
// letters, and there with as many letters where it has at most three ("mode" is not "moe").
bool is_slip(const std::string& word, const std::string& known);

}  // namespace ds::config

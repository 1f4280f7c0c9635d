// "Did you mean": edit distance with transpositions, and the nearest of some words.
#pragma once
#include <string>
#include <vector>

namespace ds::config {

// Insertions, deletions, replacements and swaps of neighbours (optimal string alignment), case-insensitive.
int edit_distance(const std::string& a, const std::string& b);

// The candidate that `word` was most likely meant to be, or "" when none is near: within max(2, a third of its
// length) edits, or one containing the other's words. Ties go to the first.
std::string nearest(const std::string& word, const std::vector<std::string>& candidates);

}  // namespace ds::config

#include "io/zip/zip_part.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "folder.h"
#include "io/memory/aligned_pool.h"
#include "io/crc32.h"
#include "io/zip/zip_writer.h"

namespace ds::io {
namespace {

// The bytes that one process writes of the file with `texts`, and the checksums of its runs.
std::vector<uint32_t> write_part(const std::string& path, const std::vector<ZipEntry>& entries,
                                 const std::vector<std::string>& texts, uint64_t begin, uint64_t end) {
  Files files;
  StreamOptions options;
  options.buffer_bytes = 1 << 18;
  ZipPart part(files, path, entries, begin, end, options);
  for (const ZipRun& run : part.runs()) {
    const char* data = texts[run.entry].data() + run.offset;
    part.write(data, run.bytes / 3);
    part.write(data + run.bytes / 3, run.bytes - run.bytes / 3);
  }
  EXPECT_EQ(part.finish().bytes, end - begin);
  EXPECT_THROW(part.write("x", 1), Error);
  return part.crc32();
}

TEST(ZipPart, PartsTailAndDescriptorsMakeTheFileOfOneWriter) {
  for (const char* parent : {"/tmp", "/dev/shm"}) {
    const Folder folder(parent);
    Files files;
    std::vector<ZipEntry> entries;
    std::vector<std::string> texts;
    for (size_t bytes : {3000, 1, 64, 0, 4096, 3000001, 4031, 0, 700000}) {
      entries.push_back({"archive/data/" + std::to_string(entries.size()), bytes});
      texts.push_back(random_bytes(bytes, static_cast<unsigned>(bytes + 1)));
    }
    ZipWriter writer(files, folder / "one", entries, {});
    for (const std::string& text : texts) writer.write(text.data(), text.size());
    writer.finish();
    const ZipLayout& layout = writer.layout();
    const std::string directory = layout.directory(writer.crc32());
    const uint64_t end = layout.file_bytes() - directory.size();
    for (size_t parts : {1, 2, 3, 7, 200}) {
      const std::string path = folder / ("of" + std::to_string(parts));
      std::vector<uint64_t> cuts{0};
      for (size_t i = 1; i < parts; ++i) cuts.push_back(end * i / parts / kBlockBytes * kBlockBytes);
      cuts.push_back(end);
      std::vector<uint32_t> joined(entries.size(), 0);
      std::vector<bool> begun(entries.size(), false);
      std::vector<std::vector<uint32_t>> sums(parts);
      for (size_t i = parts; i-- > 0;) {  // in any order
        if (cuts[i] < cuts[i + 1]) sums[i] = write_part(path, entries, texts, cuts[i], cuts[i + 1]);
      }
      for (size_t i = 0; i < parts; ++i) {
        if (cuts[i] == cuts[i + 1]) continue;
        Files unused;
        ZipPart part(unused, folder / "scratch", entries, cuts[i], cuts[i + 1], {});
        ASSERT_EQ(part.runs().size(), sums[i].size());
        for (size_t run = 0; run < sums[i].size(); ++run) {
          const size_t entry = part.runs()[run].entry;
          joined[entry] =
              begun[entry] ? crc32_joined(joined[entry], sums[i][run], part.runs()[run].bytes) : sums[i][run];
          begun[entry] = true;
        }
      }
      EXPECT_EQ(joined, writer.crc32()) << parts;
      const Descriptor file(::open(path.c_str(), O_WRONLY));
      for (size_t i = 0; i < entries.size(); ++i) {
        const std::string descriptor = layout.descriptor(i, joined[i]);
        const auto at = static_cast<off_t>(layout.data_offset(i) + entries[i].bytes);
        ASSERT_EQ(::pwrite(file.get(), descriptor.data(), descriptor.size(), at), ssize_t(descriptor.size()));
      }
      ASSERT_EQ(::pwrite(file.get(), directory.data(), directory.size(), static_cast<off_t>(end)),
                ssize_t(directory.size()));
      ASSERT_EQ(::ftruncate(file.get(), static_cast<off_t>(layout.file_bytes())), 0);
      EXPECT_TRUE(content(path) == content(folder / "one")) << parent << " " << parts;
    }
  }
}

TEST(ZipPart, RefusesWhatIsNoPart) {
  const Folder folder;
  Files files;
  EXPECT_THROW(ZipPart(files, folder / "x", {{"a", 9000}}, 1, 4096, {}), Error);
  EXPECT_THROW(ZipPart(files, folder / "x", {{"a", 9000}}, 4096, 4096, {}), Error);
  ZipPart part(files, folder / "x", {{"a", 9000}}, 0, 4096, {});
  EXPECT_THROW(part.finish(), Error);
  part.abandon();
  EXPECT_EQ(folder.entries(), 1u);  // others write it
}

}  // namespace
}  // namespace ds::io

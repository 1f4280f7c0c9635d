// Folders of this user alone (mode 0700), below folders in which other users may write, too.
#pragma once
#include <sys/types.h>

#include <functional>
#include <string>

#include "io/descriptor.h"

namespace ds::io {

// Opens the folder `below` in `base`, part by part. `make`: parts that are missing are made. A part that is a link,
// that is no folder, or that belongs to another user is a FileError (ELOOP, ENOTDIR, EPERM) which says so, and nothing
// was changed there. Rights that others have to a part are taken away. `base` itself is whatever its user says it is.
Descriptor own_folder(const std::string& base, const std::string& below, bool make);

// The last part of a path: own_folder() of the rest.
Descriptor own_folder(const std::string& path, bool make);

// Calls `make`, which creates folders and something in them, and returns its result. Another process or thread may
// remove a folder while it is empty; `make` then fails with ENOENT, and this function calls it again.
Descriptor despite_removal(const std::function<Descriptor()>& make);

// Calls `each` with the name of every entry but "." and ".."; throws FileError. `path`: of the folder, for messages.
void each_entry(const Descriptor& folder, const std::string& path,
                const std::function<void(const std::string& name)>& each);

// Opens `name` in a folder for reading and writing if it is a file, no link, of the user `owner`; else closed, and
// errno says why (EPERM: another user's, or no file).
Descriptor open_file_of(uid_t owner, const Descriptor& folder, const std::string& name);

// The owner that the file system has written down for a file which is open.
uid_t owner_of(const Descriptor& file);

}  // namespace ds::io

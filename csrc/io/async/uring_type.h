// struct io_uring, also where this is built without liburing.
#pragma once

#ifdef DS_WITH_URING
#include <liburing.h>
#else
struct io_uring {};
#endif

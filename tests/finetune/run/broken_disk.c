/* A disk that fails, for processes that load this library first (LD_PRELOAD); see broken_disk.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define STOCK(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))

/* Whether a path is one of those that BROKEN_PATH names, a part of its text. */
static int broken_path(const char *path) {
  const char *part = getenv("BROKEN_PATH");
  return part && path && strstr(path, part);
}

static int broken_file(int file) {
  char link[64], path[PATH_MAX];
  if (!getenv("BROKEN_PATH")) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0) return 0;
  path[length] = 0;
  return broken_path(path);
}

/* The error that BROKEN_WRITES names by its number, for every write into such a file. */
static int refused(int file) {
  const char *number = getenv("BROKEN_WRITES");
  if (!number || !broken_file(file)) return 0;
  errno = atoi(number);
  return 1;
}

ssize_t write(int file, const void *from, size_t size) { return refused(file) ? -1 : STOCK(write)(file, from, size); }
ssize_t pwrite(int file, const void *from, size_t size, off_t at) {
  return refused(file) ? -1 : STOCK(pwrite)(file, from, size, at);
}
ssize_t pwrite64(int file, const void *from, size_t size, off64_t at) {
  return refused(file) ? -1 : STOCK(pwrite64)(file, from, size, at);
}
ssize_t writev(int file, const struct iovec *parts, int count) {
  return refused(file) ? -1 : STOCK(writev)(file, parts, count);
}

/* The error that BROKEN_MAKES names, for every new folder and file, and every file opened to be written. */
static int unmade(const char *path, int flags) {
  const char *number = getenv("BROKEN_MAKES");
  if (!number || !(flags & (O_CREAT | O_WRONLY | O_RDWR)) || !broken_path(path)) return 0;
  errno = atoi(number);
  return 1;
}

#define MODE(flags, mode) \
  va_list rest; \
  va_start(rest, flags); \
  mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
  va_end(rest);

int open(const char *path, int flags, ...) {
  MODE(flags, mode)
  return unmade(path, flags) ? -1 : STOCK(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
  MODE(flags, mode)
  return unmade(path, flags) ? -1 : STOCK(open64)(path, flags, mode);
}
int openat(int folder, const char *path, int flags, ...) {
  MODE(flags, mode)
  return unmade(path, flags) ? -1 : STOCK(openat)(folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) {
  MODE(flags, mode)
  return unmade(path, flags) ? -1 : STOCK(openat64)(folder, path, flags, mode);
}
int mkdir(const char *path, mode_t mode) { return unmade(path, O_CREAT) ? -1 : STOCK(mkdir)(path, mode); }

/* BROKEN_FAT: no locks and no links, as macOS has them on exFAT, and no rename over a file, as some sshfs servers. */
static int fat(const char *path) { return getenv("BROKEN_FAT") && broken_path(path); }

static int taken(const char *path) {
  struct stat found;
  return fat(path) && lstat(path, &found) == 0 && (errno = EEXIST);
}

static int without_links(const char *path) { return fat(path) && (errno = EPERM); }

static int without_locks(int file) { return getenv("BROKEN_FAT") && broken_file(file) && (errno = EOPNOTSUPP); }

int flock(int file, int how) { return without_locks(file) ? -1 : STOCK(flock)(file, how); }
int fcntl64(int file, int command, ...) {
  va_list rest;
  va_start(rest, command);
  void *value = va_arg(rest, void *);
  va_end(rest);
  if ((command == F_SETLK || command == F_SETLKW) && without_locks(file)) return -1;
  return STOCK(fcntl64)(file, command, value);
}
int rename(const char *from, const char *to) { return taken(to) ? -1 : STOCK(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) { return taken(to) ? -1 : STOCK(renameat)(a, from, b, to); }
int link(const char *from, const char *to) { return without_links(to) ? -1 : STOCK(link)(from, to); }
int linkat(int a, const char *from, int b, const char *to, int how) {
  return without_links(to) ? -1 : STOCK(linkat)(a, from, b, to, how);
}
int symlink(const char *from, const char *to) { return without_links(to) ? -1 : STOCK(symlink)(from, to); }

/* BROKEN_CLOCK: the wall clock goes back by an hour every so many readings. */
int clock_gettime(clockid_t which, struct timespec *now) {
  static int readings, back;
  const char *every = getenv("BROKEN_CLOCK");
  int result = STOCK(clock_gettime)(which, now);
  if (every && which == CLOCK_REALTIME) {
    if (++readings % atoi(every) == 0) back += 3600;
    now->tv_sec -= back;
  }
  return result;
}

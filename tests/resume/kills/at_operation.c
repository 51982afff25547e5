/* Counts what a process does to the files below a folder and the lines that it prints, and sends a signal at the n-th.

   For LD_PRELOAD. kills_arm begins to count in the process that calls it: a forked child is not counted. Each operation
   is a line "name path" in the log; the last line is the one at which the signal was sent. An operation that is killed has
   not happened, a write has happened by half. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define FILES 4096

static char folder[PATH_MAX];
static size_t length;
static pid_t armed;
static int number, log_file = -1;
static atomic_long left;
static char written[FILES]; /* by descriptor: whether it writes a file below the folder */

void kills_arm(const char *below, long at, int with, int log) {
    strncpy(folder, below, sizeof folder - 1);
    length = strlen(folder);
    memset(written, 0, sizeof written);
    left = at;
    number = with;
    log_file = log;
    armed = getpid();
}

/* Log an operation; whether it is the one. */
static int counted(const char *name, const char *path) {
    char line[PATH_MAX + 32];
    int size = snprintf(line, sizeof line, "%s %s\n", name, path);
    syscall(SYS_write, log_file, line, size);
    return atomic_fetch_sub(&left, 1) == 1;
}

/* The path relative to the folder, or NULL for one elsewhere, or where this process does not count. */
static const char *below(int at, const char *path, char *whole) {
    if (!armed || armed != getpid() || path == NULL) return NULL;
    if (path[0] == '/') {
        snprintf(whole, PATH_MAX, "%s", path);
    } else {
        char start[PATH_MAX] = "", link[64];
        if (at == AT_FDCWD) {
            if (getcwd(start, sizeof start) == NULL) return NULL;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", at);
            if (readlink(link, start, sizeof start - 1) < 0) return NULL;
        }
        if (snprintf(whole, PATH_MAX, "%s/%s", start, path) >= PATH_MAX) return NULL;
    }
    if (strncmp(whole, folder, length) != 0) return NULL;
    if (whole[length] == '\0') return ".";
    return whole[length] == '/' ? whole + length + 1 : NULL;
}

static void operation(const char *name, int at, const char *path) {
    char whole[PATH_MAX];
    const char *found = below(at, path, whole);
    if (found && counted(name, found)) kill(getpid(), number);
}

static void on_descriptor(const char *name, int file) {
    char link[64], path[PATH_MAX] = "";
    if (!armed || armed != getpid()) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (readlink(link, path, sizeof path - 1) > 0) operation(name, AT_FDCWD, path);
}

#define STOCK(type, name, ...)                                  \
    static type (*stock)(__VA_ARGS__);                          \
    if (!stock) stock = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name);

static int opened(int file, int at, const char *path, int writes) {
    char whole[PATH_MAX];
    if (file >= 0 && file < FILES) written[file] = writes && below(at, path, whole) != NULL;
    return file;
}

#define WRITES(flags) (((flags) & O_ACCMODE) != O_RDONLY || ((flags) & O_CREAT))
#define MODE(flags)                     \
    mode_t mode = 0;                    \
    if (__OPEN_NEEDS_MODE(flags)) {     \
        va_list more;                   \
        va_start(more, flags);          \
        mode = va_arg(more, mode_t);    \
        va_end(more);                   \
    }

#define OPEN(name)                                                \
    int name(const char *path, int flags, ...) {                  \
        MODE(flags)                                               \
        STOCK(int, #name, const char *, int, ...)                 \
        if (WRITES(flags)) operation("open", AT_FDCWD, path);     \
        return opened(stock(path, flags, mode), AT_FDCWD, path, WRITES(flags)); \
    }
#define OPENAT(name)                                              \
    int name(int at, const char *path, int flags, ...) {          \
        MODE(flags)                                               \
        STOCK(int, #name, int, const char *, int, ...)            \
        if (WRITES(flags)) operation("open", at, path);           \
        return opened(stock(at, path, flags, mode), at, path, WRITES(flags)); \
    }
#define FOPEN(name)                                               \
    FILE *name(const char *path, const char *mode) {              \
        int writes = strpbrk(mode, "wa+") != NULL;                \
        STOCK(FILE *, #name, const char *, const char *)          \
        if (writes) operation("open", AT_FDCWD, path);            \
        FILE *file = stock(path, mode);                           \
        if (file) opened(fileno(file), AT_FDCWD, path, writes);   \
        return file;                                              \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
FOPEN(fopen)
FOPEN(fopen64)

#define ONE_PATH(name, known, call, ...)                          \
    int name(__VA_ARGS__) {                                       \
        STOCK(int, #name, __VA_ARGS__)                            \
        operation(known, AT_FDCWD, path);                         \
        return stock call;                                        \
    }
ONE_PATH(unlink, "unlink", (path), const char *path)
ONE_PATH(rmdir, "rmdir", (path), const char *path)
ONE_PATH(mkdir, "mkdir", (path, mode), const char *path, mode_t mode)
ONE_PATH(link, "link", (other, path), const char *other, const char *path)
ONE_PATH(rename, "rename", (other, path), const char *other, const char *path)

int unlinkat(int at, const char *path, int flags) {
    STOCK(int, "unlinkat", int, const char *, int)
    operation(flags & AT_REMOVEDIR ? "rmdir" : "unlink", at, path);
    return stock(at, path, flags);
}

int mkdirat(int at, const char *path, mode_t mode) {
    STOCK(int, "mkdirat", int, const char *, mode_t)
    operation("mkdir", at, path);
    return stock(at, path, mode);
}

int renameat(int from, const char *other, int at, const char *path) {
    STOCK(int, "renameat", int, const char *, int, const char *)
    operation("rename", at, path);
    return stock(from, other, at, path);
}

int fsync(int file) {
    STOCK(int, "fsync", int)
    on_descriptor("fsync", file);
    return stock(file);
}

int ftruncate(int file, off_t size) {
    STOCK(int, "ftruncate", int, off_t)
    on_descriptor("truncate", file);
    return stock(file, size);
}

int ftruncate64(int file, off64_t size) {
    STOCK(int, "ftruncate64", int, off64_t)
    on_descriptor("truncate", file);
    return stock(file, size);
}

/* Half of what a write has is written before the signal; whether this is the write. */
static void writing(int file, const void *bytes, size_t size) {
    char link[64], path[PATH_MAX] = "", whole[PATH_MAX];
    if (!armed || armed != getpid()) return;
    if (file == 1 || file == 2) {
        if (size && counted("line", file == 1 ? "stdout" : "stderr")) kill(getpid(), number);
        return;
    }
    if (file < 0 || file >= FILES || !written[file] || file == log_file) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (readlink(link, path, sizeof path - 1) <= 0) return;
    const char *found = below(AT_FDCWD, path, whole);
    if (!found || !counted("write", found)) return;
    if (number == SIGKILL) syscall(SYS_write, file, bytes, size / 2);
    kill(getpid(), number);
}

ssize_t write(int file, const void *bytes, size_t size) {
    STOCK(ssize_t, "write", int, const void *, size_t)
    writing(file, bytes, size);
    return stock(file, bytes, size);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    STOCK(ssize_t, "writev", int, const struct iovec *, int)
    if (count > 0) writing(file, parts[0].iov_base, parts[0].iov_len);
    return stock(file, parts, count);
}

/* A disk that lies, under one program: preloaded into a member, it notes what a loss of power could take back.
 *
 * RAFTKV_DISK names a folder with `control` (below; mapped, so that the harness can change it under a running member), an
 * empty folder `kept`, and a `log` that this file appends to. RAFTKV_DISK_ROOT is the absolute path of the directory whose files are
 * watched. What stands in the log, and how a disk is rebuilt from it: jepsen/faults/power.py.
 *
 *   W  bytes were written: what stood there before       C  a name was made        R  a name was changed
 *   T  a file changed its length                         U  a name was removed     B, E  a sync began, succeeded
 *
 * Each record is appended after its call, and B before it: a call that a kill interrupts may be missing, and was then
 * not acknowledged. Mapped files are noted as they are when mapped. Names that are removed or replaced live on in `kept`.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/aio_abi.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPENS = 1, READS = 2, WRITES = 4, SYNCS = 8, NAMES = 16, ALLOCATIONS = 32 };
#define SHORT 4096 /* in the place of an errno: half of the bytes are written */
#define WRITTEN 1  /* flags of W: durable when the call returned; */
#define MAPPED 2   /* changed by stores, which no sync ends; */
#define ZEROS 4    /* the bytes before were zeros, and are left out */

struct control { uint32_t lies, delay_us, calls, error, per_million; };
struct record { uint32_t kind, flags, a_len, b_len; uint64_t id, offset, length, size; };

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);

static volatile struct control *control;
static int log_fd = -1;
static char root[PATH_MAX], kept[PATH_MAX];
static size_t root_len;
static atomic_ullong ids;

#define REAL(name) \
  static __typeof__(name) *real; \
  if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static ssize_t real_pread(int fd, void *data, size_t size, off_t at) { return syscall(SYS_pread64, fd, data, size, at); }

__attribute__((constructor)) static void begin(void) {
  const char *folder = getenv("RAFTKV_DISK"), *watched = getenv("RAFTKV_DISK_ROOT");
  char path[PATH_MAX];
  if (!folder || !watched) return;
  snprintf(root, sizeof root, "%s", watched);
  snprintf(kept, sizeof kept, "%s/kept", folder);
  snprintf(path, sizeof path, "%s/control", folder);
  int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
  void *map = fd < 0 ? MAP_FAILED : (void *)syscall(SYS_mmap, 0, sizeof *control, PROT_READ, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) return;
  close(fd);
  snprintf(path, sizeof path, "%s/log", folder);
  fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 900);
  syscall(SYS_close, fd);
  control = map;
  root_len = strlen(root);
  ids = ((uint64_t)getpid() << 40) | 1;
}

static int is_below(const char *path) {
  return log_fd >= 0 && strncmp(path, root, root_len) == 0 && (path[root_len] == '/' || !path[root_len]);
}

static int path_at(int dir, const char *name, char *path) { /* absolute; whether it is watched */
  char link[64];
  ssize_t n = 0;
  if (!root_len || !name) return 0;
  if (name[0] != '/') {
    snprintf(link, sizeof link, dir == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", dir);
    if ((n = readlink(link, path, PATH_MAX - 1)) < 0) return 0;
    path[n++] = '/';
  }
  snprintf(path + n, PATH_MAX - (size_t)n, "%s", name);
  return is_below(path);
}

static int is_watched(int fd, struct stat *about, char *path) {
  char link[64];
  if (!root_len || fd < 0 || fd == log_fd || fstat(fd, about) < 0) return 0;
  if (!S_ISREG(about->st_mode) && !S_ISDIR(about->st_mode)) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, PATH_MAX - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return is_below(path) || (S_ISDIR(about->st_mode) && !strncmp(root, path, (size_t)n) && !strchr(root + n + 1, '/'));
}

static void note(uint32_t kind, uint32_t flags, uint64_t id, uint64_t offset, uint64_t length, uint64_t size,
                 const char *a, const void *b, size_t b_len) {
  struct record head = {kind, flags, a ? (uint32_t)strlen(a) : 0, (uint32_t)b_len, id, offset, length, size};
  struct iovec parts[3] = {{&head, sizeof head}, {(void *)a, head.a_len}, {(void *)b, b_len}};
  int before = errno;
  if (syscall(SYS_writev, log_fd, parts, 3) < 0) abort();
  errno = before;
}

static int fails(int kind) { /* the errno that this call is to fail with; 0: none */
  static _Thread_local uint64_t state __attribute__((tls_model("initial-exec"))); /* malloc asks: none of its own */
  if (!control || !(control->calls & (uint32_t)kind)) return 0;
  if (!state) state = (uint64_t)getpid() * 2654435761u + ++ids;
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state % 1000000 < control->per_million ? (int)control->error : 0;
}

#define FAIL(kind, value) \
  do { int code = fails(kind); if (code && code != SHORT) { errno = code; return value; } } while (0)

/* ---- contents ---- */

struct before { struct stat about; char path[PATH_MAX], *data; ssize_t size; int fd, flags; off_t at; size_t length; };

static void look(struct before *b, int fd, off_t at, size_t length) { /* before a write; at < 0: where the file stands */
  b->fd = -1;
  if (!is_watched(fd, &b->about, b->path)) return;
  b->fd = fd, b->length = length, b->flags = fcntl(fd, F_GETFL);
  b->at = at >= 0 ? at : b->flags & O_APPEND ? b->about.st_size : lseek(fd, 0, SEEK_CUR);
  b->data = __libc_malloc(length ? length : 1);
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  int own = (int)syscall(SYS_openat, AT_FDCWD, link, O_RDONLY | O_CLOEXEC, 0);
  b->size = real_pread(own, b->data, length, b->at);
  if (b->size < 0) b->size = 0;
  syscall(SYS_close, own);
}

static ssize_t wrote(struct before *b, ssize_t done, uint32_t flags) {
  if (b->fd < 0) return done;
  int before = errno;
  if (done > 0) {
    size_t size = b->size < done ? (size_t)b->size : (size_t)done, zeros = 0;
    while (zeros < size && !b->data[zeros]) zeros++;
    if (b->flags & O_DSYNC && !(flags & MAPPED)) flags |= WRITTEN;
    if (control->lies) flags &= ~(uint32_t)WRITTEN;
    if (zeros == size) flags |= ZEROS;
    note('W', flags, b->about.st_ino, (uint64_t)b->at, (uint64_t)done, (uint64_t)b->about.st_size, 0, b->data,
         flags & ZEROS ? 0 : size);
  }
  free(b->data);
  errno = before;
  return done;
}

static ssize_t write_parts(int fd, const struct iovec *parts, int count, off_t at, int flags) {
  struct before b;
  size_t length = 0;
  for (int i = 0; i < count; i++) length += parts[i].iov_len;
  look(&b, fd, at, length);
  int code = b.fd < 0 || !length ? 0 : fails(WRITES);
  struct iovec half = {parts[0].iov_base, parts[0].iov_len / 2};
  ssize_t done = -1;
  if (code && code != SHORT) errno = code;
  else if (code && half.iov_len) done = syscall(SYS_pwritev2, fd, &half, 1, at, 0, flags);
  else done = syscall(SYS_pwritev2, fd, parts, count, at, 0, flags);
  return wrote(&b, done, flags & (RWF_DSYNC | RWF_SYNC) ? WRITTEN : 0);
}

ssize_t write(int fd, const void *data, size_t size) {
  return write_parts(fd, &(struct iovec){(void *)data, size}, 1, -1, 0);
}
ssize_t writev(int fd, const struct iovec *parts, int count) { return write_parts(fd, parts, count, -1, 0); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  return write_parts(fd, &(struct iovec){(void *)data, size}, 1, at, 0);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) {
  return write_parts(fd, parts, count, at, 0);
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) {
  return write_parts(fd, parts, count, at, flags);
}
ssize_t pwrite(int, const void *, size_t, off_t) __attribute__((alias("pwrite64")));
ssize_t pwritev(int, const struct iovec *, int, off_t) __attribute__((alias("pwritev64")));
ssize_t pwritev2(int, const struct iovec *, int, off_t, int) __attribute__((alias("pwritev64v2")));

ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
  struct before b;
  if (control && control->calls & READS && is_watched(fd, &b.about, b.path)) FAIL(READS, -1);
  return real_pread(fd, data, size, at);
}
ssize_t pread(int, void *, size_t, off_t) __attribute__((alias("pread64")));

static int resize(int fd, off_t size, int allocates) { /* an errno */
  struct before b;
  int watched = is_watched(fd, &b.about, b.path), code = watched ? fails(WRITES) : 0;
  if (code && code != SHORT) return code;
  if (allocates ? syscall(SYS_fallocate, fd, 0, 0, size) : syscall(SYS_ftruncate, fd, size)) return errno;
  if (watched && (size > b.about.st_size || !allocates))
    note('T', 0, b.about.st_ino, 0, (uint64_t)size, (uint64_t)b.about.st_size, 0, 0, 0);
  return 0;
}

int ftruncate64(int fd, off64_t size) { int code = resize(fd, size, 0); errno = code; return code ? -1 : 0; }
int ftruncate(int, off_t) __attribute__((alias("ftruncate64")));
int posix_fallocate64(int fd, off64_t at, off64_t size) { return resize(fd, at + size, 1); }
int posix_fallocate(int, off_t, off_t) __attribute__((alias("posix_fallocate64")));
int truncate64(const char *name, off64_t size) {
  int fd = open(name, O_WRONLY | O_CLOEXEC), result = fd < 0 ? -1 : ftruncate64(fd, size), code = errno;
  if (fd >= 0) close(fd);
  errno = code;
  return result;
}
int truncate(const char *, off_t) __attribute__((alias("truncate64")));

/* Copies within the kernel are refused, so that they are made by reads and writes. */
ssize_t sendfile64(int out, int in, off64_t *at, size_t size) {
  struct before b;
  if (is_watched(out, &b.about, b.path)) { errno = EINVAL; return -1; }
  return syscall(SYS_sendfile, out, in, at, size);
}
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
  struct before b;
  if (is_watched(out, &b.about, b.path)) { errno = EINVAL; return -1; }
  return syscall(SYS_copy_file_range, in, from, out, to, size, flags);
}

void *mmap64(void *address, size_t size, int access, int flags, int fd, off64_t at) {
  if (access & PROT_WRITE && flags & MAP_SHARED && fd >= 0) {
    struct before b;
    look(&b, fd, at, size);
    wrote(&b, (ssize_t)size, MAPPED);
  }
  return (void *)syscall(SYS_mmap, address, size, access, flags, fd, at);
}
void *mmap(void *, size_t, int, int, int, off_t) __attribute__((alias("mmap64")));

/* ---- syncs ---- */

static uint64_t sync_began(int fd, int *watched, uint64_t id) {
  struct before b;
  if ((*watched = is_watched(fd, &b.about, b.path)))
    note('B', 0, id, 0, 0, b.about.st_ino, S_ISDIR(b.about.st_mode) ? b.path : 0, 0, 0);
  return id;
}

static int synced(int fd, long call) {
  int watched;
  uint64_t id = sync_began(fd, &watched, ++ids);
  if (watched) {
    FAIL(SYNCS, -1);
    if (control->delay_us) nanosleep(&(struct timespec){control->delay_us / 1000000, control->delay_us % 1000000 * 1000L}, 0);
    if (control->lies) return 0;
  }
  int result = (int)syscall(call, fd);
  if (watched && !result) note('E', 0, id, 0, 0, 0, 0, 0, 0);
  return result;
}
int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

/* Asynchronous syncs have no functions in the C library. `data` of a request is not used by raftkv, and names the sync. */
long syscall(long number, ...) {
  va_list list;
  long a[6];
  va_start(list, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
  va_end(list);
  REAL(syscall);
  if (number == SYS_io_submit && control) {
    struct iocb *request = ((struct iocb **)a[2])[0];
    int watched;
    if (control->delay_us || fails(SYNCS)) { errno = EAGAIN; return -1; }
    request->aio_data = sync_began((int)request->aio_fildes, &watched, ++ids);
  }
  long result = real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  if (number == SYS_io_getevents && control && result == 1 && !control->lies) {
    struct io_event *event = (struct io_event *)a[3];
    if (event->res == 0) note('E', 0, event->data, 0, 0, 0, 0, 0, 0);
  }
  return result;
}

/* ---- names ---- */

static void keep(const char *path, struct stat *old) { /* a second name for a file that is about to lose one */
  char other[PATH_MAX + 32];
  old->st_ino = 0;
  if (stat(path, old) < 0 || S_ISDIR(old->st_mode)) return;
  snprintf(other, sizeof other, "%s/%llu", kept, (unsigned long long)old->st_ino);
  syscall(SYS_linkat, AT_FDCWD, path, AT_FDCWD, other, 0);
}

int openat64(int dir, const char *name, int flags, ...) {
  va_list list;
  va_start(list, flags);
  mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0;
  va_end(list);
  char path[PATH_MAX];
  int watched = path_at(dir, name, path), writes = flags & (O_CREAT | O_WRONLY | O_RDWR);
  struct stat old, new;
  if (watched && (writes || control->error == EMFILE || control->error == EIO)) FAIL(OPENS, -1);
  int is_new = watched && flags & O_CREAT && stat(path, &old) < 0;
  int fd = (int)syscall(SYS_openat, dir, name, flags, mode);
  if (watched && fd >= 0 && writes && !fstat(fd, &new)) {
    if (is_new) note('C', 0, new.st_ino, 0, 0, 0, path, 0, 0);
    else if (flags & O_TRUNC) note('T', 0, new.st_ino, 0, 0, 0, 0, 0, 0);
  }
  return fd;
}
#define OPEN(mode) va_list list; va_start(list, flags); mode_t mode = flags & O_CREAT ? va_arg(list, mode_t) : 0; va_end(list)
int openat(int, const char *, int, ...) __attribute__((alias("openat64")));
int open64(const char *name, int flags, ...) { OPEN(mode); return openat64(AT_FDCWD, name, flags, mode); }
int open(const char *, int, ...) __attribute__((alias("open64")));
int __open64_2(const char *name, int flags) { return openat64(AT_FDCWD, name, flags, 0); }

int renameat(int from_dir, const char *from, int to_dir, const char *to) {
  char a[PATH_MAX], b[PATH_MAX];
  int watched = path_at(from_dir, from, a) | path_at(to_dir, to, b);
  struct stat old = {0};
  if (watched) { FAIL(NAMES, -1); keep(b, &old); }
  int result = (int)syscall(SYS_renameat, from_dir, from, to_dir, to);
  if (watched && !result) note('R', 0, old.st_ino, 0, 0, 0, a, b, strlen(b));
  return result;
}
int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

int unlinkat(int dir, const char *name, int flags) {
  char path[PATH_MAX];
  struct stat old = {0};
  int watched = path_at(dir, name, path);
  if (watched) { FAIL(NAMES, -1); keep(path, &old); }
  int result = (int)syscall(SYS_unlinkat, dir, name, flags);
  if (watched && !result) note('U', 0, flags & AT_REMOVEDIR ? 0 : old.st_ino, 0, 0, 0, path, 0, 0);
  return result;
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdir(const char *name, mode_t mode) {
  char path[PATH_MAX];
  int watched = path_at(AT_FDCWD, name, path);
  if (watched) FAIL(NAMES, -1);
  int result = (int)syscall(SYS_mkdir, name, mode);
  if (watched && !result) note('C', 0, 0, 0, 0, 0, path, 0, 0);
  return result;
}

/* ---- memory ---- */

void *malloc(size_t size) {
  FAIL(ALLOCATIONS, NULL);
  return __libc_malloc(size);
}
void *calloc(size_t count, size_t size) {
  FAIL(ALLOCATIONS, NULL);
  return __libc_calloc(count, size);
}
void *realloc(void *data, size_t size) {
  FAIL(ALLOCATIONS, NULL);
  return __libc_realloc(data, size);
}

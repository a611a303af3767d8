/* A double of NCCL for machines without GPUs: the same functions, moving host memory between two processes.
 *
 * What it keeps of the real library: ranks meet through the socket that the unique id names, and wait for each other
 * without end; a communicator that does not block returns "in progress" and is polled, also for a launch, which reaches
 * the stream only later; a send waits for the matching receive, in stream order; both must agree in bytes and type, or
 * hang; the end of a transfer shows in the stream and nowhere else; a peer that dies is no error, the stream just
 * hangs, until the communicator is aborted.
 *
 * Streams are somebody else's: `nccl_double_set_enqueue` takes the function that puts a launch into one, which then has
 * to call `nccl_double_run` from the stream's thread. Environment, read at each call:
 *   NCCL_DOUBLE_VERSION  what ncclGetVersion says (22809)
 *   NCCL_DOUBLE_HANG     words of: init launch finalize abort; that one never ends (init, launch, finalize: until an abort)
 *   NCCL_DOUBLE_FAIL     NAME:CODE, a function that fails
 *   NCCL_DOUBLE_LATE_US  how long a launch is in progress (200)
 *   NCCL_DOUBLE_LOST_AT  bytes after which this side of a transfer neither sends nor receives any more
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define POLL_MS 1

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };

typedef struct {
  char internal[128];
} unique_id;

typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char *net_name;
  int split_share;
} config;

typedef struct transfer {
  int is_send;
  char *at;
  size_t bytes;
  int type;
} transfer;

typedef struct comm {
  atomic_int alive, aborted, state, running;
  int rank, blocking, max_ctas;
  int out, in; /* sockets, one a direction */
  unique_id id;
  pthread_t worker;
  int has_worker;
  int registered;
} comm;

typedef struct launch {
  comm *comm;
  void *stream;
  int count, room;
  transfer *transfers;
  struct launch *next;
} launch;

typedef void (*enqueue_function)(void *stream, void *launch);

static enqueue_function enqueue;
static __thread int depth;
static __thread int group_error;
static __thread launch *group;
static char last_error[256] = "";
static atomic_int num_communicators, num_registered, num_hung;

static int failed(int code, const char *text) {
  snprintf(last_error, sizeof last_error, "%s", text);
  return code;
}

static int planned(const char *name) {
  const char *plan = getenv("NCCL_DOUBLE_FAIL");
  size_t length = strlen(name);
  if (plan && strncmp(plan, name, length) == 0 && plan[length] == ':')
    return failed(atoi(plan + length + 1), "the double was told to fail");
  return SUCCESS;
}

static int hangs(const char *what) {
  const char *words = getenv("NCCL_DOUBLE_HANG");
  return words && strstr(words, what) != NULL;
}

static long number(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text ? atol(text) : otherwise;
}

static void hang_until_aborted(comm *c) {
  atomic_fetch_add(&num_hung, 1);
  while (!atomic_load(&c->aborted)) usleep(1000);
  atomic_fetch_sub(&num_hung, 1);
}

/* ---- Where ranks meet: a thread that waits for both, and gives each its ends of two pairs of sockets. ---- */

static int send_fds(int sock, const int fds[2]) {
  char byte = 'f', space[CMSG_SPACE(2 * sizeof(int))] = {0};
  struct iovec piece = {&byte, 1};
  struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
  struct cmsghdr *header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(2 * sizeof(int));
  memcpy(CMSG_DATA(header), fds, 2 * sizeof(int));
  return sendmsg(sock, &message, MSG_NOSIGNAL) == 1 ? 0 : -1;
}

static int receive_fds(int sock, int fds[2]) {
  char byte, space[CMSG_SPACE(2 * sizeof(int))] = {0};
  struct iovec piece = {&byte, 1};
  struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
  if (recvmsg(sock, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT) != 1) return -1;
  struct cmsghdr *header = CMSG_FIRSTHDR(&message);
  if (!header || header->cmsg_len != CMSG_LEN(2 * sizeof(int))) return -1;
  memcpy(fds, CMSG_DATA(header), 2 * sizeof(int));
  return 0;
}

static void *meet(void *argument) {
  int listener = (int)(intptr_t)argument, socks[2] = {-1, -1}, first[2], second[2];
  while (socks[0] < 0 || socks[1] < 0) { /* for ever, where one never comes: as the real one */
    int rank, sock = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (sock < 0 || recv(sock, &rank, sizeof rank, MSG_WAITALL) != sizeof rank || rank < 0 || rank > 1)
      continue;
    socks[rank] = sock;
  }
  socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, first);
  socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, second);
  int zero[2] = {first[0], second[1]}, one[2] = {second[0], first[1]}; /* out, in */
  send_fds(socks[0], zero);
  send_fds(socks[1], one);
  for (int i = 0; i < 2; i++) {
    close(first[i]);
    close(second[i]);
    close(socks[i]);
  }
  close(listener);
  return NULL;
}

static socklen_t address_of(const unique_id *id, struct sockaddr_un *address) {
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  memcpy(address->sun_path + 1, id->internal, 64); /* an abstract name: no file */
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strnlen(id->internal, 64));
}

static void *join_peer(void *argument) {
  comm *c = argument;
  struct sockaddr_un address;
  socklen_t length = address_of(&c->id, &address);
  int fds[2] = {-1, -1}, sock = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (hangs("init") || connect(sock, (struct sockaddr *)&address, length) < 0) hang_until_aborted(c);
  if (!atomic_load(&c->aborted)) send(sock, &c->rank, sizeof c->rank, MSG_NOSIGNAL);
  while (!atomic_load(&c->aborted)) {
    struct pollfd ready = {sock, POLLIN, 0};
    if (poll(&ready, 1, POLL_MS) == 1) {
      if (receive_fds(sock, fds) == 0) break;
      hang_until_aborted(c); /* whoever made the id is gone */
    }
  }
  close(sock);
  c->out = fds[0];
  c->in = fds[1];
  if (fds[0] >= 0) atomic_store(&c->state, SUCCESS);
  return NULL;
}

/* ---- A launch, in its stream. ---- */

typedef struct {
  uint64_t bytes, type;
} ready_note; /* from who receives to who sends: before it no byte goes */

typedef struct {
  launch *of;
  int next, sock, is_send, stuck;
  size_t done;
  int agreed;
} side;

static transfer *current(side *s) {
  while (s->next < s->of->count && s->of->transfers[s->next].is_send != s->is_send) s->next++;
  return s->next < s->of->count && !s->stuck ? &s->of->transfers[s->next] : NULL;
}

static void advance(side *s, ssize_t moved, long lost_at) {
  if (moved == 0 || (moved < 0 && errno != EAGAIN && errno != EINTR)) {
    s->stuck = 1; /* the peer is gone: no error, as over NVLink */
    return;
  }
  if (moved > 0) s->done += (size_t)moved;
  if (lost_at >= 0 && s->done >= (size_t)lost_at) s->stuck = 1;
  if (!s->stuck && s->done == s->of->transfers[s->next].bytes) {
    s->next++;
    s->done = 0;
    s->agreed = 0;
  }
}

static void step(side *s, transfer *t, long lost_at) {
  ready_note note = {t->bytes, (uint64_t)t->type};
  if (s->is_send && !s->agreed) {
    ssize_t got = recv(s->sock, &note, sizeof note, MSG_DONTWAIT);
    if (got == sizeof note && note.bytes == t->bytes && note.type == (uint64_t)t->type)
      s->agreed = 1;
    else if (got >= 0 || errno != EAGAIN)
      s->stuck = 1; /* gone, or it expects something else */
    return;
  }
  if (!s->is_send && !s->agreed) {
    s->agreed = send(s->sock, &note, sizeof note, MSG_NOSIGNAL) == sizeof note;
    s->stuck = !s->agreed;
    return;
  }
  size_t left = t->bytes - s->done;
  /* One call moves without end where the peer keeps up, so where to stop is said to it. */
  if (lost_at >= 0 && s->done + left > (size_t)lost_at) left = (size_t)lost_at - s->done;
  if (s->is_send)
    advance(s, send(s->sock, t->at + s->done, left, MSG_NOSIGNAL | MSG_DONTWAIT), lost_at);
  else
    advance(s, recv(s->sock, t->at + s->done, left, MSG_DONTWAIT), lost_at);
}

EXPORT void nccl_double_run(void *argument) {
  launch *l = argument;
  comm *c = l->comm;
  side sides[2] = {{l, 0, c->out, 1, 0, 0, 0}, {l, 0, c->in, 0, 0, 0, 0}};
  long lost_at = number("NCCL_DOUBLE_LOST_AT", -1);
  while (!atomic_load(&c->aborted)) {
    struct pollfd waits[2];
    int left = 0;
    for (int i = 0; i < 2; i++) {
      transfer *t = current(&sides[i]);
      left |= t != NULL || sides[i].stuck;
      waits[i].fd = t ? sides[i].sock : -1;
      waits[i].events = sides[i].is_send == sides[i].agreed ? POLLOUT : POLLIN;
    }
    if (!left) break;
    poll(waits, 2, POLL_MS);
    for (int i = 0; i < 2; i++)
      if (waits[i].fd >= 0 && waits[i].revents) step(&sides[i], current(&sides[i]), lost_at);
  }
  atomic_fetch_sub(&c->running, 1);
  free(l->transfers);
  free(l);
}

static void into_stream(launch *l) {
  enqueue(l->stream, l);
}

static void *launch_late(void *argument) {
  launch *l = argument;
  comm *c = l->comm;
  usleep((useconds_t)number("NCCL_DOUBLE_LATE_US", 200));
  if (hangs("launch")) hang_until_aborted(c);
  if (atomic_load(&c->aborted)) {
    atomic_fetch_sub(&c->running, 1);
    free(l->transfers);
    free(l);
    return NULL;
  }
  into_stream(l);
  int expected = IN_PROGRESS;
  atomic_compare_exchange_strong(&c->state, &expected, SUCCESS);
  return NULL;
}

static void join_worker(comm *c) {
  if (c->has_worker) pthread_join(c->worker, NULL);
  c->has_worker = 0;
}

static int begin(comm *c, void *(*work)(void *), void *argument) {
  join_worker(c);
  atomic_store(&c->state, IN_PROGRESS);
  if (pthread_create(&c->worker, NULL, work, argument)) return failed(SYSTEM_ERROR, "no thread");
  c->has_worker = 1;
  return IN_PROGRESS;
}

/* ---- NCCL's functions. ---- */

static int usable(comm *c) {
  if (!c) return failed(INVALID_ARGUMENT, "comm argument is NULL");
  if (!atomic_load(&c->alive)) return failed(INVALID_ARGUMENT, "the communicator was freed");
  return SUCCESS;
}

static int quiet(comm *c) {
  int code = usable(c);
  if (!code && atomic_load(&c->state) != SUCCESS) code = failed(INVALID_ARGUMENT, "attempt to use it while in progress");
  return code;
}

EXPORT void nccl_double_set_enqueue(enqueue_function function) { enqueue = function; }
EXPORT int nccl_double_num_communicators(void) { return atomic_load(&num_communicators); }
EXPORT int nccl_double_num_registered(void) { return atomic_load(&num_registered); }
EXPORT int nccl_double_num_hung(void) { return atomic_load(&num_hung); }
EXPORT int nccl_double_max_ctas(comm *c) { return c->max_ctas; }

EXPORT int ncclGetVersion(int *version) {
  *version = (int)number("NCCL_DOUBLE_VERSION", 22809);
  return planned("ncclGetVersion");
}

EXPORT const char *ncclGetErrorString(int code) {
  static const char *texts[] = {"no error",         "unhandled cuda error", "unhandled system error", "internal error",
                                "invalid argument", "invalid usage",        "remote process exited",  "in progress"};
  return code >= 0 && code < 8 ? texts[code] : "unknown result code";
}

EXPORT const char *ncclGetLastError(comm *c) {
  (void)c;
  return last_error;
}

EXPORT int ncclGetUniqueId(unique_id *id) {
  static atomic_int counter;
  struct sockaddr_un address;
  pthread_t thread;
  int code = planned("ncclGetUniqueId");
  if (code) return code;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, 64, "nccl-double-%d-%d-%ld", getpid(), atomic_fetch_add(&counter, 1), random());
  int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(listener, (struct sockaddr *)&address, address_of(id, &address)) || listen(listener, 8) ||
      pthread_create(&thread, NULL, meet, (void *)(intptr_t)listener))
    return failed(SYSTEM_ERROR, strerror(errno));
  pthread_detach(thread);
  return SUCCESS;
}

EXPORT int ncclCommInitRankConfig(comm **out, int num_ranks, unique_id id, int rank, config *conf) {
  int code = planned("ncclCommInitRankConfig");
  *out = NULL;
  if (code) return code;
  if (num_ranks != 2 || rank < 0 || rank > 1) return failed(INVALID_ARGUMENT, "the double joins ranks 0 and 1");
  if (conf->magic != 0xcafebeef || conf->size != sizeof(config) || conf->version < 21800)
    return failed(INVALID_ARGUMENT, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
  if (conf->cga_cluster_size != INT_MIN || conf->min_ctas != INT_MIN || conf->net_name || conf->split_share != INT_MIN ||
      conf->blocking < 0 || conf->blocking > 1 || conf->max_ctas < 1)
    return failed(INVALID_ARGUMENT, "a field of ncclConfig_t is not what the double expects");
  comm *c = calloc(1, sizeof *c); /* never freed: its use after an abort is to be noticed */
  c->rank = rank;
  c->blocking = conf->blocking;
  c->max_ctas = conf->max_ctas;
  c->id = id;
  c->out = c->in = -1;
  atomic_store(&c->alive, 1);
  atomic_fetch_add(&num_communicators, 1);
  *out = c;
  code = begin(c, join_peer, c);
  if (c->blocking) join_worker(c);
  return c->blocking ? atomic_load(&c->state) : code;
}

EXPORT int ncclCommInitRank(comm **out, int num_ranks, unique_id id, int rank) {
  config blocking = {sizeof(config), 0xcafebeef, 21800, 1, INT_MIN, INT_MIN, 32, NULL, INT_MIN};
  return ncclCommInitRankConfig(out, num_ranks, id, rank, &blocking);
}

EXPORT int ncclCommGetAsyncError(comm *c, int *state) {
  int code = usable(c);
  if (code) return code;
  *state = planned("asynchronous") ? planned("asynchronous") : atomic_load(&c->state);
  return SUCCESS;
}

static void release(comm *c) {
  atomic_store(&c->alive, 0);
  atomic_fetch_sub(&num_communicators, 1);
  atomic_fetch_sub(&num_registered, c->registered);
  if (c->out >= 0) close(c->out);
  if (c->in >= 0) close(c->in);
}

EXPORT int ncclCommAbort(comm *c) {
  int code = usable(c);
  if (code) return code;
  while (hangs("abort")) usleep(1000);
  atomic_store(&c->aborted, 1);
  join_worker(c);
  while (atomic_load(&c->running)) usleep(500); /* what is in a stream sees the flag */
  release(c);
  return planned("ncclCommAbort");
}

static void *run_dry(void *argument) {
  comm *c = argument;
  if (hangs("finalize")) hang_until_aborted(c);
  while (atomic_load(&c->running) && !atomic_load(&c->aborted)) usleep(500);
  atomic_store(&c->state, SUCCESS);
  return NULL;
}

EXPORT int ncclCommFinalize(comm *c) {
  int code = quiet(c);
  if (!code) code = planned("ncclCommFinalize");
  if (code) return code;
  code = begin(c, run_dry, c);
  if (c->blocking) join_worker(c);
  return c->blocking ? SUCCESS : code;
}

/* NCCL's service thread ends, and destroying comes back, only once the peer has hung up as well. */
EXPORT int ncclCommDestroy(comm *c) {
  int code = quiet(c);
  if (code) return code;
  join_worker(c);
  if (c->out >= 0) shutdown(c->out, SHUT_WR);
  for (char bytes[256]; c->in >= 0;) {
    struct pollfd peer = {.fd = c->in, .events = POLLIN};
    if (poll(&peer, 1, -1) > 0 && read(c->in, bytes, sizeof bytes) == 0) break;
  }
  release(c);
  return planned("ncclCommDestroy");
}

EXPORT int ncclGroupStart(void) {
  depth++;
  return SUCCESS;
}

EXPORT int ncclGroupEnd(void) {
  int code = SUCCESS;
  if (depth == 0) return failed(INVALID_USAGE, "ncclGroupEnd: not in a group call.");
  if (--depth) return SUCCESS;
  if (!group_error) group_error = planned("ncclGroupEnd");
  while (group) {
    launch *l = group;
    group = l->next;
    if (group_error) {
      free(l->transfers);
      free(l);
      continue;
    }
    atomic_fetch_add(&l->comm->running, 1);
    if (l->comm->blocking)
      into_stream(l);
    else
      code = begin(l->comm, launch_late, l);
  }
  code = group_error ? group_error : code;
  group_error = SUCCESS;
  return code;
}

static int add(int is_send, void *at, size_t bytes, int type, int peer, comm *c, void *stream) {
  int code = quiet(c);
  if (!code && (type != 0 && type != 1)) code = failed(INVALID_ARGUMENT, "the double knows bytes only");
  if (!code && (peer != 1 - c->rank || !at || !enqueue)) code = failed(INVALID_ARGUMENT, "invalid peer or buffer");
  if (!code) code = planned(is_send ? "ncclSend" : "ncclRecv");
  if (code) return group_error = code;
  launch *l = group;
  while (l && l->comm != c) l = l->next;
  if (!l) {
    l = calloc(1, sizeof *l);
    l->comm = c;
    l->stream = stream;
    l->next = group;
    group = l;
  }
  if (l->stream != stream) return group_error = failed(INVALID_USAGE, "one stream for a communicator in a group");
  if (l->count == l->room) {
    l->room = l->room ? 2 * l->room : 8;
    l->transfers = realloc(l->transfers, (size_t)l->room * sizeof *l->transfers);
  }
  l->transfers[l->count++] = (transfer){is_send, at, bytes, type};
  return SUCCESS;
}

static int add_in_group(int is_send, void *at, size_t bytes, int type, int peer, comm *c, void *stream) {
  ncclGroupStart();
  int code = add(is_send, at, bytes, type, peer, c, stream), ended = ncclGroupEnd();
  return code ? code : ended;
}

EXPORT int ncclSend(void *at, size_t bytes, int type, int peer, comm *c, void *stream) {
  return add_in_group(1, at, bytes, type, peer, c, stream);
}

EXPORT int ncclRecv(void *at, size_t bytes, int type, int peer, comm *c, void *stream) {
  return add_in_group(0, at, bytes, type, peer, c, stream);
}

#ifndef WITHOUT_REGISTER
EXPORT int ncclCommRegister(comm *c, void *at, size_t bytes, void **handle) {
  int code = quiet(c);
  if (!code) code = planned("ncclCommRegister");
  if (!code && (!at || !bytes)) code = failed(INVALID_ARGUMENT, "nothing to register");
  if (code) return code;
  c->registered++;
  atomic_fetch_add(&num_registered, 1);
  *handle = at;
  return SUCCESS;
}

EXPORT int ncclCommDeregister(comm *c, void *handle) {
  int code = quiet(c);
  if (!code && (!handle || !c->registered)) code = failed(INVALID_ARGUMENT, "not registered");
  if (code) return code;
  c->registered--;
  atomic_fetch_sub(&num_registered, 1);
  return SUCCESS;
}

EXPORT int ncclMemAlloc(void **at, size_t bytes) {
  *at = calloc(1, bytes);
  return *at ? SUCCESS : failed(SYSTEM_ERROR, "out of memory");
}

EXPORT int ncclMemFree(void *at) {
  free(at);
  return SUCCESS;
}
#endif

/* What a START asks for, as a value. Pure: no I/O, no state. */
#ifndef BARCHAN_REQUESTS_H
#define BARCHAN_REQUESTS_H
#include "bytes.h"
#include "frames.h"

#define PATH_LIMIT 4096u
#define USER_LIMIT 256u
#define KEEP 0xffffffffu

enum write_flag { WRITE_PARENTS = 1, WRITE_APPEND = 2, WRITE_EXCLUSIVE = 4 };
enum mkdir_flag { MKDIR_PARENTS = 1 };
enum remove_flag { REMOVE_TREE = 1, REMOVE_MISSING = 2 };
enum put_flag { PUT_PARENTS = 1 };

/* `argv`, `env` and `command` are malloc'ed blocks that request_release frees. Unused fields of a kind are zero. */
struct request {
    uint8_t kind;
    uint32_t flags;
    uint32_t timeout_ms, grace_ms, nofile;
    uint16_t rows, columns; /* of a terminal */
    uint64_t output_limit;
    char **argv, **env;
    uint32_t argc, envc;
    uint64_t shell; /* the operation that opened the session */
    char *command;
    uint64_t offset, length;
    uint32_t depth, mode, uid, gid;
    bool follow;
    char user[USER_LIMIT]; /* from here on only the text that was read is set, of `to` only if it was */
    char path[PATH_LIMIT]; /* always absolute; EXEC: the working directory */
    char to[PATH_LIMIT];
};

/* False if malformed; nothing is left to release then. */
bool request_parse(uint8_t kind, struct span body, struct request *out);
void request_release(struct request *request);
#endif

#include "guest.h"

#include <errno.h>

void file_start(struct op *op, const struct request *request)
{
    (void)request;
    op_fail(op, ENOSYS, "open");
}
